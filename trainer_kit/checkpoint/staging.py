"""`HostStaging`: copies of a run's tensors in host memory, made while training continues."""

from __future__ import annotations

import errno
import threading
from collections.abc import Sequence
from typing import Any

import torch

from trainer_kit.checkpoint.format.safetensors_writer import address
from trainer_kit.run import Run
from trainer_kit.utils.optimizer_state import state_tensors
from trainer_kit.utils.units import format_size


class HostStaging:
    """Copies of a run's tensors, in host memory that is reused for each checkpoint.

    Optimizer states, two thirds of the tensors with AdamW, change only in the optimizer's step. Another thread copies
    them (`complete`) during the next forward and backward pass, and the loop waits before its optimizer step (`wait`).
    All other tensors are copied immediately, since a forward pass may change weights (`Embedding(max_norm=1)`).

    Args:
        run: The run, with its optimizer.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self._places: list[torch.Tensor] = []
        self._later: list[tuple[torch.Tensor, torch.Tensor, int]] = []  # from, to, version
        self._moment: Any = None
        self._done = threading.Event()
        self._done.set()

    def reserve(self, tensors: list[torch.Tensor]) -> None:
        """Reserve host memory for copies of these tensors, so that the first copy need not allocate it."""
        try:
            self._places = self.run.strategy.device_info.host_memory(tensors)
        except (MemoryError, RuntimeError):
            return  # `take` raises when the memory is needed
        for place in self._places:
            place.zero_()  # the system allocates pages at the first write

    def take(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return host copies in the same order; `complete` fills those of the optimizer's state.

        Raises:
            OSError: If the host lacks memory for the copies.
        """
        strategy = self.run.strategy
        self._places = places = self._memory_for(tensors)
        stable = self._of_the_optimizer() if strategy.device_info.supports_concurrent_copy else set()
        pairs = [(tensor, place, address(tensor) in stable) for tensor, place in zip(tensors, places, strict=True)]
        self._later = [(tensor, place, tensor._version) for tensor, place, waits in pairs if waits]
        self._moment = strategy.device_info.record_event()
        now = [(tensor, place) for tensor, place, waits in pairs if not waits]
        strategy.device_info.copy_to_host([tensor for tensor, _ in now], [place for _, place in now])
        self._done.clear()
        return places

    def collect(self, tensors: Sequence[torch.Tensor], owners: Sequence[int]) -> list[torch.Tensor | None]:
        """Return host copies of the tensors that this process owns, and None for the others. Collective.

        Args:
            tensors: Tensors, of which each process may hold a part; the same ones in the same order on all processes.
            owners: Rank of each tensor's owner.

        Raises:
            OSError: If a process lacks memory for its copies; raised on all processes.
        """
        strategy, error = self.run.strategy, None
        is_own = [owner == strategy.rank for owner in owners]
        try:
            self._places = self._memory_for([tensor for tensor, own in zip(tensors, is_own, strict=True) if own])
        except OSError as lacks:
            error = lacks
        if any(failed := strategy.collectives.gather_object(error is not None)):
            who = strategy.collectives.describe_rank(failed.index(True))
            raise error or OSError(errno.ENOMEM, f"{who} has no host memory for a copy of its part of the state")
        own = iter(self._places)
        places = [next(own) if is_mine else None for is_mine in is_own]
        strategy.collect(tensors, owners, places)
        return places

    def complete(self) -> None:
        """Fill the remaining copies; called in another thread than the loop's.

        Raises:
            OSError: If a tensor changed during the copy, so that the copy may be inconsistent.
        """
        try:
            later, self._later = self._later, []
            sources = [tensor for tensor, _, _ in later]
            self.run.strategy.device_info.copy_to_host(sources, [place for _, place, _ in later], self._moment)
            if any(tensor._version != version for tensor, _, version in later):
                raise OSError(
                    "the optimizer's state was written to while it was copied, before the optimizer's step (by a "
                    "listener); set async_save=False"
                )
        finally:
            self._done.set()

    @property
    def is_under_way(self) -> bool:
        """Whether copies have begun and `complete` has not returned."""
        return not self._done.is_set()

    def wait(self) -> None:
        """Wait until the copies are complete, so that the optimizer may change its state."""
        self._done.wait()

    def free(self) -> None:
        """Free the host memory."""
        self._places = []
        self._done.set()

    def _memory_for(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        try:
            return self.run.strategy.device_info.host_memory(tensors, self._places)
        except (MemoryError, RuntimeError) as error:
            size = format_size(sum(tensor.nbytes for tensor in tensors))
            text = f"no host memory for a copy of the state ({size}); set async_save=False"
            raise OSError(errno.ENOMEM, text) from error

    def _of_the_optimizer(self) -> set[int]:
        assert self.run.optimizer is not None
        return {address(tensor) for tensor in state_tensors(self.run.optimizer)} - {0}
