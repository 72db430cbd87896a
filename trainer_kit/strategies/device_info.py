"""`DeviceInfo`: memory, time and random numbers of a device, and its copies on the host."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from trainer_kit.profiling.time_ledger import Clock, HostClock
from trainer_kit.strategies.pinned_slabs import empty_copy, pinned_places, release_pinned_memory
from trainer_kit.utils.pytree import strides_of_copy
from trainer_kit.utils.units import GIB

_NO_MEMORY = (
    "out of memory",
    "not enough memory: you tried to allocate",
    "can't allocate memory",
    "_STATUS_ALLOC_FAILED",
)
"""Texts of out-of-memory errors of CUDA, MPS, torch's CPU allocator, cuBLAS and cuDNN that lack their own class."""


class DeviceInfo:
    """Properties of a device for the loop, callbacks and checkpoints. The base class is for the CPU.

    Args:
        device: Device of the model and the batches.
        host_processes: Number of processes that share the host's memory.
    """

    def __init__(self, device: torch.device, host_processes: int = 1) -> None:
        self.device = device
        self.host_processes = host_processes

    @functools.cached_property
    def pins_memory(self) -> bool:
        """Whether copies to the device are faster from page-locked memory."""
        return self.device.type == "cuda"

    @functools.cached_property
    def reads_without_sync(self) -> bool:
        """Whether the host reads a tensor's value without waiting for the device."""
        return self.device.type == "cpu"

    @property
    def supports_concurrent_copy(self) -> bool:
        """Whether `copy_to_host` may run in another thread while the device computes."""
        return self.device.type in ("cpu", "cuda")

    def memory(self) -> dict[str, Any]:
        """Return `memory_gib` in use now and `peak_memory_gib` since the process started, in GiB.

        On the CPU it is the resident set of the process.
        """
        info = _process(os.getpid()).memory_info()
        peak = max(info.rss, _peak_resident_bytes(info))
        return {"memory_gib": info.rss / GIB, "peak_memory_gib": peak / GIB}

    def fragmentation_hint(self) -> str | None:
        """Return a sentence on how to reduce the fragmentation of the device's memory; None if it costs little."""
        return None

    def free_memory(self) -> int:
        """Return the bytes that tensors can still take on the device.

        A tenth of the host's available memory is kept free: without any, the operating system kills a process.
        """
        import psutil  # takes 6 ms

        return int(psutil.virtual_memory().available * 0.9) // self.host_processes

    def empty_cache(self) -> None:
        """Return the allocator's cached memory to the device."""
        if self.device.type != "cpu":
            torch.get_device_module(self.device).empty_cache()

    def oom_message(self, error: BaseException) -> str | None:
        """Return the first line of an out-of-memory error; None for any other error."""
        is_known = isinstance(error, RuntimeError) and any(text in str(error) for text in _NO_MEMORY)
        if not is_known and not isinstance(error, (torch.OutOfMemoryError, MemoryError)):
            return None
        return str(error).partition("\n")[0] or type(error).__name__

    def rng_state(self) -> Any:
        """Return the state of the device's generator; None for the CPU, whose generator is the host's."""
        return None if self.device.type == "cpu" else torch.get_device_module(self.device).get_rng_state()

    def set_rng_state(self, state: Any) -> None:
        """Restore a state that `rng_state` returned; a state of another kind of device is ignored."""
        if isinstance(state, torch.Tensor) and self.device.type != "cpu":
            torch.get_device_module(self.device).set_rng_state(state)

    def clock(self) -> Clock:
        """Return the clock that measures the device's time."""
        return HostClock()

    def compilations(self) -> tuple[int, float]:
        """Return the number of graphs that this process has compiled, and the seconds it took.

        The base class reads the counters of torch.compile, and does not import its modules for that.
        """
        dynamo = sys.modules.get("torch._dynamo.utils")
        if dynamo is None or not dynamo.counters["stats"]["unique_graphs"]:
            return 0, 0.0
        return dynamo.counters["stats"]["unique_graphs"], float(dynamo.calculate_time_spent()["total_wall_time"])

    def traced_scalar(self, number: int) -> Any:
        """Return a number for a step's computation, in a form whose value does not change the compiled graph."""
        return number

    def mark_step(self) -> None:
        """Execute the recorded computations, on a device that records them lazily."""

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a full copy of a model's or an optimizer's tensor on the host."""
        return tensor.cpu()

    def host_memory(self, tensors: Iterable[torch.Tensor], free: Iterable[torch.Tensor] = ()) -> list[torch.Tensor]:
        """Return an uninitialized host tensor for a copy of each tensor, reusing tensors of `free` that fit."""
        places: dict[Any, list[torch.Tensor]] = {}
        for place in free:
            is_pinned = self.pins_memory and place.is_pinned()
            places.setdefault((is_pinned, place.shape, place.dtype, place.stride()), []).append(place)
        wanted = [*tensors]
        # Tensors of the host (an optimizer's steps) are copied by the host.
        pins = [self.pins_memory and tensor.device.type != "cpu" and tensor.numel() > 0 for tensor in wanted]
        keys = [(pin, each.shape, each.dtype, strides_of_copy(each)) for pin, each in zip(pins, wanted, strict=True)]
        reused = [fitting.pop() if (fitting := places.get(key)) else None for key in keys]
        missing = [tensor for tensor, pin, place in zip(wanted, pins, reused, strict=True) if pin and place is None]
        pinned = iter(pinned_places(missing))
        return [
            place if place is not None else next(pinned) if pin else empty_copy(tensor)
            for tensor, pin, place in zip(wanted, pins, reused, strict=True)
        ]

    def release_host_memory(self) -> None:
        """Return the page-locked memory that no tensor uses to the operating system; torch would keep it."""
        if self.pins_memory:
            release_pinned_memory()

    def record_event(self) -> Any:
        """Return an event at the current end of the device's queue, for `copy_to_host`; None without a queue."""
        return torch.get_device_module(self.device).current_stream().record_event() if self.pins_memory else None

    def copy_to_host(self, tensors: Sequence[torch.Tensor], places: Sequence[torch.Tensor], moment: Any = None) -> None:
        """Copy full tensors to the host, and wait until the copies are complete.

        Args:
            tensors: Tensors of a model or an optimizer, on any device.
            places: Targets, as `host_memory` returns them.
            moment: Event of `record_event`; the copy does not wait for later work of the device. None: copy after all
                work in the queue.
        """
        stream: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        if moment is not None:
            module = torch.get_device_module(self.device)
            side = module.Stream(self.device)
            side.wait_event(moment)
            stream = module.stream(side)
        with stream:
            if tensors:
                torch._foreach_copy_([*places], [each.detach() for each in tensors], non_blocking=self.pins_memory)
            if self.pins_memory:
                torch.get_device_module(self.device).current_stream(self.device).synchronize()


@functools.cache
def _process(number: int) -> Any:
    """Return this process; cached by its PID, since the lookup is slow and a fork changes the PID."""
    import psutil

    return psutil.Process(number)


def _peak_resident_bytes(info: Any) -> int:
    """Return the peak resident set in bytes: from psutil on Windows, else from the resource module."""
    if hasattr(info, "peak_wset"):
        return int(info.peak_wset)
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(peak if sys.platform == "darwin" else peak * 1024)
