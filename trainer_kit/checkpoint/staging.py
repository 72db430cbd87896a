"""`HostStaging`: the tensors of a run in host memory, copied while training goes on."""

from __future__ import annotations

import errno
import threading
from typing import Any

import torch

from trainer_kit.checkpoint.format.json_files import readable_size
from trainer_kit.checkpoint.format.safetensors_writer import address
from trainer_kit.run import Run
from trainer_kit.utils.optimizer_state import state_tensors


class HostStaging:
    """Copies of a run's tensors, in memory that is used again from one checkpoint to the next.

    What the optimizer keeps, two thirds of AdamW's state, changes in its step alone: another thread copies it
    (`complete`) while the next step's forward and backward pass runs; before its optimizer's step the loop waits
    (`wait`). Everything else is copied at once: a forward pass may write to weights too (`Embedding(max_norm=1)`).

    Args:
        run: Its optimizer is made.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self._places: list[torch.Tensor] = []
        self._later: list[tuple[torch.Tensor, torch.Tensor, int]] = []  # from, to, version
        self._moment: Any = None
        self._done = threading.Event()
        self._done.set()

    def reserve(self, tensors: list[torch.Tensor]) -> None:
        """Takes the memory for copies of these tensors, so that the first copy finds it there."""
        try:
            self._places = self.run.strategy.device_info.host_memory(tensors)
        except (MemoryError, RuntimeError):
            return  # `take` says so when it is needed
        for place in self._places:
            place.zero_()  # the system gives memory when it is first written to

    def take(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Copies on the host in the same order, of which some are not filled before `complete`.

        Raises:
            OSError: If the host has no memory for them.
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

    def complete(self) -> None:
        """Copies the rest, in another thread than the loop's.

        Raises:
            OSError: If a tensor was written to in the meantime, so that its copy may hold both.
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
        """Whether `complete` has still to come to its end."""
        return not self._done.is_set()

    def wait(self) -> None:
        """Waits until what the run holds may change."""
        self._done.wait()

    def free(self) -> None:
        """Gives the memory back."""
        self._places = []
        self._done.set()

    def _memory_for(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        try:
            return self.run.strategy.device_info.host_memory(tensors, self._places)
        except (MemoryError, RuntimeError) as error:
            size = readable_size(sum(tensor.nbytes for tensor in tensors))
            text = f"no host memory for a copy of the state ({size}); set async_save=False"
            raise OSError(errno.ENOMEM, text) from error

    def _of_the_optimizer(self) -> set[int]:
        assert self.run.optimizer is not None
        return {address(tensor) for tensor in state_tensors(self.run.optimizer)} - {0}
