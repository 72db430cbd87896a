"""`CudaInfo`: memory and time of an NVIDIA GPU."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence
from typing import Any

import torch

from trainer_kit.strategies.device_info import DeviceInfo
from trainer_kit.strategies.fragmentation import fragmentation_hint
from trainer_kit.strategies.nvml import card_memory
from trainer_kit.utils.units import GIB


class CudaInfo(DeviceInfo):
    """One GPU of this machine."""

    def memory(self) -> dict[str, Any]:
        """Return memory of the GPU in GiB by name.

        `memory_gib` and `peak_memory_gib` are in tensors; PyTorch's allocator holds `reserved_memory_gib`. With NVML
        installed (`pip install nvidia-ml-py`), `device_memory_gib` is in use on the whole GPU, and
        `process_memory_gib` by this process.
        """
        return {
            "memory_gib": torch.cuda.memory_allocated(self.device) / GIB,
            "reserved_memory_gib": torch.cuda.memory_reserved(self.device) / GIB,
            "peak_memory_gib": torch.cuda.max_memory_allocated(self.device) / GIB,
            **card_memory(torch.cuda.get_device_properties(self.device)),
        }

    def fragmentation_hint(self) -> str | None:
        figures = self.memory()
        return fragmentation_hint(figures["reserved_memory_gib"], figures["peak_memory_gib"])

    def free_memory(self) -> int:
        unused = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        return torch.cuda.mem_get_info(self.device)[0] + unused

    def clock(self) -> CudaClock:
        return CudaClock(self.device)


class CudaClock:
    """Clock of CUDA events on the current stream; an event has passed when all earlier work on it is done."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: list[torch.cuda.Event] = []  # creating an event takes longer than recording it

    def mark(self) -> torch.cuda.Event:
        """Return an event that is recorded now."""
        event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def passed(self, marks: Sequence[torch.cuda.Event]) -> list[float]:
        """Return the seconds between consecutive events that have passed, and keep those events for reuse."""
        all_passed = len(marks) if marks[-1].query() else None
        count = all_passed or bisect.bisect(marks, False, key=lambda event: not event.query())
        there = marks[:count]
        seconds = [before.elapsed_time(after) / 1000 for before, after in itertools.pairwise(there)]  # it returns ms
        self._free += there[:-1]
        return seconds
