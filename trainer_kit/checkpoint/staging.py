"""`HostStaging`: copies of a run's tensors in host memory, made while training continues."""

from __future__ import annotations

import errno
import threading
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
        self._later: list[tuple[torch.Tensor, torch.Tensor]] = []  # from, to
        self._stable: list[tuple[torch.Tensor, int]] = []  # with their versions; they must not change until `complete`
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
        strategy, optimizer = self.run.strategy, self.run.optimizer
        assert optimizer is not None
        self._places = places = self._memory_for(tensors)
        states = [*state_tensors(optimizer)] if strategy.device_info.supports_concurrent_copy else []
        parts = strategy.sharding.own_parts(states)
        stable = {address(tensor) for tensor in parts} - {0}
        pairs = [(tensor, place, address(tensor) in stable) for tensor, place in zip(tensors, places, strict=True)]
        self._later = [(tensor, place) for tensor, place, waits in pairs if waits]
        # An operation on a sharded tensor counts there alone, one on its part in the part alone.
        self._stable = [(tensor, tensor._version) for tensor in (*states, *parts)]
        self._moment = strategy.device_info.record_event()
        now = [(tensor, place) for tensor, place, waits in pairs if not waits]
        strategy.device_info.copy_to_host([tensor for tensor, _ in now], [place for _, place in now])
        self._done.clear()
        return places

    def complete(self) -> None:
        """Fill the remaining copies; called in another thread than the loop's.

        Raises:
            OSError: If a tensor changed during the copy, so that the copy may be inconsistent.
        """
        try:
            (later, self._later), (stable, self._stable) = (self._later, []), (self._stable, [])
            sources, places = [tensor for tensor, _ in later], [place for _, place in later]
            self.run.strategy.device_info.copy_to_host(sources, places, self._moment)
            if any(tensor._version != version for tensor, version in stable):
                raise OSError(
                    "the optimizer's state was written to while it was copied, before the optimizer's step (by a "
                    "listener); set async_save=False"
                )
        finally:
            self._done.set()

    def abandon(self) -> None:
        """Let the optimizer change its state without waiting for copies that are not needed any more."""
        self._later, self._stable = [], []
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
        self.run.strategy.device_info.release_host_memory()

    def _memory_for(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        try:
            return self.run.strategy.device_info.host_memory(tensors, self._places)
        except (MemoryError, RuntimeError) as error:
            size = format_size(sum(tensor.nbytes for tensor in tensors))
            text = f"no host memory for a copy of the state ({size}); set async_save=False"
            raise OSError(errno.ENOMEM, text) from error
