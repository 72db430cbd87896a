"""One process on one device: CPU, one CUDA GPU, or Apple's MPS."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch

from trainer_kit.profiling.time_ledger import Clock
from trainer_kit.strategies.base import GIB, Strategy
from trainer_kit.strategies.nvml import card_memory
from trainer_kit.strategies.precision import Precision
from trainer_kit.utils.pytree import map_tensors, tensors

T = TypeVar("T")


class SingleDevice(Strategy):
    """Runs on one device of this machine.

    Args:
        device: For example "cpu" or "cuda:1"; None takes CUDA, else MPS, else the CPU.
        precision: See `Strategy`.
    """

    def __init__(self, device: str | torch.device | None = None, precision: Precision | None = None) -> None:
        super().__init__(precision)
        self.device = torch.device(device) if device is not None else _best_device()
        if self.device.type == "cuda" and self.device.index is None:
            self.device = torch.device("cuda", torch.cuda.current_device())

    def setup(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
        super().setup()

    def seed(self, value: int) -> None:
        super().seed(value)
        if self.device.type == "cuda":
            torch.cuda.default_generators[self.device.index].manual_seed(value)
        elif self.device.type == "mps":
            torch.mps.manual_seed(value)

    def prepare_loader(self, batches: Iterable[T]) -> Iterator[T]:
        if self.device.type == "cuda":
            return self._copied_ahead(batches)
        return super().prepare_loader(batches)

    def _copied_ahead(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Copies the next batch to the GPU on a side stream while the current one is worked on."""
        stream = torch.cuda.Stream(self.device)
        waiting: Any = None
        for item in batches:
            with torch.cuda.stream(stream):
                item.batch = map_tensors(self._pinned_copy, item.batch)
            if waiting is not None:
                yield waiting
            # Waited for only now: what is enqueued for the batch before must not wait for this copy.
            _hand_over(item.batch, stream)
            waiting = item
        if waiting is not None:
            yield waiting

    def _pinned_copy(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device.type == "cpu":
            tensor = tensor if tensor.is_pinned() else tensor.pin_memory()
        return tensor.to(self.device, non_blocking=True)

    def free_memory(self) -> int:
        if self.device.type == "cuda":
            unused = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
            return torch.cuda.mem_get_info(self.device)[0] + unused
        if self.device.type == "mps":
            return torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory()
        return super().free_memory()

    def clock(self) -> Clock:
        return CudaClock(self.device) if self.device.type == "cuda" else super().clock()

    def memory(self) -> dict[str, float]:
        """On CUDA: `memory_gib` and `peak_memory_gib` in tensors, `reserved_memory_gib` held by PyTorch's allocator.

        There NVML, where it can be asked (`pip install nvidia-ml-py`), adds `device_memory_gib`, in use on the
        whole card, and `process_memory_gib`, of it by this process. On MPS the driver keeps no peak: `memory_gib` is in
        tensors, the peak that of the process.
        """
        if self.device.type == "cuda":
            return {
                "memory_gib": torch.cuda.memory_allocated(self.device) / GIB,
                "reserved_memory_gib": torch.cuda.memory_reserved(self.device) / GIB,
                "peak_memory_gib": torch.cuda.max_memory_allocated(self.device) / GIB,
                **card_memory(torch.cuda.get_device_properties(self.device)),
            }
        figures = super().memory()
        if self.device.type == "mps":
            figures["memory_gib"] = torch.mps.current_allocated_memory() / GIB
        return figures


class CudaClock:
    """Events on a GPU's present stream: they are passed when all is done that it was given before."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: list[torch.cuda.Event] = []  # to make one takes longer than to record it

    def mark(self) -> torch.cuda.Event:
        """An event that is recorded now."""
        event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def passed(self, marks: Sequence[torch.cuda.Event]) -> list[float]:
        """Seconds between the events that have passed."""
        all_passed = len(marks) if marks[-1].query() else None
        count = all_passed or bisect.bisect(marks, False, key=lambda event: not event.query())
        there = marks[:count]
        seconds = [before.elapsed_time(after) / 1000 for before, after in itertools.pairwise(there)]  # it tells ms
        self._free += there[:-1]
        return seconds


def _best_device() -> torch.device:
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("mps" if torch.backends.mps.is_available() else "cpu")


def _hand_over(batch: Any, stream: torch.cuda.Stream) -> None:
    """Lets the current stream use what `stream` copies, and keeps the allocator from giving the memory away early."""
    current = torch.cuda.current_stream(stream.device)
    current.wait_stream(stream)
    for tensor in tensors(batch):
        if tensor.device.type == "cuda":
            tensor.record_stream(current)
