"""`fake_cuda`: the context of a simulation, and the functions of torch that it replaces."""

from __future__ import annotations

import contextlib
import importlib
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from kit.fake_cuda.gpus import Gpus
from kit.fake_cuda.modes import Calls, Operators
from kit.fake_cuda.tensors import replace_tensor_methods
from kit.fake_cuda.threads import replace_threads

GIB = 2**30
_LOOK_FOR_GPUS = ("torch._dynamo", "torch.profiler", "torch.nn.parallel", "torch.distributed")
"""Modules that must not find the simulated devices while they are imported."""


@contextlib.contextmanager
def fake_cuda(count: int = 1, memory: int | None = None) -> Iterator[Gpus]:
    """Run as on a machine with NVIDIA GPUs; see the package.

    Args:
        count: Number of devices.
        memory: Bytes of each; None: no limit.
    """
    for name in _LOOK_FOR_GPUS:
        importlib.import_module(name)
    gpus = Gpus(count, memory)

    @contextlib.contextmanager
    def modes() -> Iterator[None]:
        try:
            with Calls(gpus), Operators(gpus):
                yield
        finally:
            if gpus.has_ended:
                _forget_modes()

    with pytest.MonkeyPatch.context() as patches, modes():
        replace_tensor_methods(gpus, patches)
        replace_threads(gpus, modes, patches)
        _replace_runtime(gpus, patches)
        _replace_memory(gpus, patches)
        _replace_autocast(patches)
        _replace_processes(patches)
        try:
            yield gpus
        finally:
            gpus.has_ended = True


def _forget_modes() -> None:
    """Let torch know that no mode is active.

    It keeps that in globals, as if the modes of all threads ended in the order in which they began. A global that stays
    true keeps torch.compile from compiling.
    """
    for name, value in vars(torch.utils._python_dispatch).items():
        if name.startswith("_is_in_") and value is True:
            setattr(torch.utils._python_dispatch, name, False)


def _properties(index: int) -> types.SimpleNamespace:
    return types.SimpleNamespace(
        name="NVIDIA H100 80GB HBM3", total_memory=80 * GIB, major=9, minor=0, multi_processor_count=132,
        uuid=f"00000000-0000-0000-0000-{index:012d}",
    )  # fmt: skip


def _replace_runtime(gpus: Gpus, patches: pytest.MonkeyPatch) -> None:
    def set_device(device: Any) -> None:
        gpus.scope.index = gpus.device(device).index

    def synchronize(device: Any = None) -> None:
        gpus.wait_for_stream("torch.cuda.synchronize", gpus.device(device))

    def manual_seed(seed: int) -> None:
        gpus.generators[gpus.scope.index].manual_seed(seed)

    def manual_seed_all(seed: int) -> None:
        for generator in gpus.generators:
            generator.manual_seed(seed)

    def rng_state(device: Any = None) -> torch.Tensor:
        return gpus.generators[gpus.device(device).index].get_state()

    def set_rng_state(state: torch.Tensor, device: Any = None) -> None:
        gpus.generators[gpus.device(device).index].set_state(state)

    def set_sync_debug_mode(mode: str) -> None:
        gpus.sync_debug_mode = mode

    def group_by_device(tensors: Any, with_indices: bool = False) -> Any:
        """Torch's optimizers group tensors by their real device."""
        groups = grouped(tensors, with_indices)
        return {(lists[0][0].device, dtype): (lists, indices) for (_, dtype), (lists, indices) in groups.items()}

    grouped = torch._C._group_tensors_by_device_and_dtype
    patches.setattr(torch._C, "_group_tensors_by_device_and_dtype", group_by_device)
    functions = {
        "is_available": lambda: True, "is_initialized": lambda: True, "init": lambda: None, "_lazy_init": lambda: None,
        "device_count": lambda: gpus.count, "current_device": lambda: gpus.scope.index, "set_device": set_device,
        "synchronize": synchronize, "Stream": gpus.stream_type, "Event": gpus.event_type, "stream": gpus.on_stream,
        "current_stream": gpus.current_stream, "default_stream": gpus.default_stream,
        "is_current_stream_capturing": lambda: False, "is_bf16_supported": lambda *_, **__: True,
        "get_device_properties": lambda device=None: _properties(gpus.device(device).index),
        "get_device_name": lambda device=None: _properties(0).name, "get_device_capability": lambda device=None: (9, 0),
        "default_generators": gpus.generators, "manual_seed": manual_seed, "manual_seed_all": manual_seed_all,
        "get_rng_state": rng_state, "set_rng_state": set_rng_state, "set_sync_debug_mode": set_sync_debug_mode,
    }  # fmt: skip
    for name, function in functions.items():
        patches.setattr(torch.cuda, name, function)
    # DataLoaders and optimizers ask here.
    for name, function in {
        "is_available": lambda: True, "current_accelerator": lambda *_, **__: torch.device("cuda"),
        "current_device_index": lambda: gpus.scope.index, "set_device_index": set_device,
        "current_stream": gpus.current_stream, "empty_host_cache": gpus.pinned.release,
    }.items():  # fmt: skip
        patches.setattr(torch.accelerator, name, function, raising=False)  # torch 2.9 lacks some


def _replace_memory(gpus: Gpus, patches: pytest.MonkeyPatch) -> None:
    def pool(device: Any) -> Any:
        return gpus.pools[gpus.device(device).index]

    def reset_peak(device: Any = None) -> None:
        pool(device).peak = pool(device).used

    def free_and_total(device: Any = None) -> tuple[int, int]:
        total = pool(device).limit or _properties(0).total_memory
        return total - pool(device).used, total

    for name in ("memory_allocated", "memory_reserved"):
        patches.setattr(torch.cuda, name, lambda device=None: pool(device).used)
    for name in ("max_memory_allocated", "max_memory_reserved"):
        patches.setattr(torch.cuda, name, lambda device=None: pool(device).peak)
    patches.setattr(torch.cuda, "reset_peak_memory_stats", reset_peak)
    patches.setattr(torch.cuda, "mem_get_info", free_and_total)
    patches.setattr(torch.cuda, "empty_cache", lambda: None)
    patches.setattr(torch.cuda.memory, "get_allocator_backend", lambda: "native")
    patches.setattr(torch.cuda.memory, "_record_memory_history", lambda *_, **__: None)
    patches.setattr(torch.cuda.memory, "_dump_snapshot", lambda path: Path(path).write_bytes(b"device_traces"))


def _replace_autocast(patches: pytest.MonkeyPatch) -> None:
    """CUDA's autocast is the CPU's."""

    def real(device_type: str) -> str:
        return "cpu" if device_type == "cuda" else device_type

    class Autocast(torch.amp.autocast_mode.autocast):
        def __init__(self, device_type: str, *args: Any, **kwargs: Any) -> None:
            super().__init__(real(device_type), *args, **kwargs)

    patches.setattr(torch, "autocast", Autocast)
    patches.setattr(torch.amp, "autocast", Autocast)
    is_enabled, dtype = torch.is_autocast_enabled, torch.get_autocast_dtype
    patches.setattr(torch, "is_autocast_enabled", lambda device_type="cuda": is_enabled(real(device_type)))
    patches.setattr(torch, "get_autocast_dtype", lambda device_type: dtype(real(device_type)))


def _replace_processes(patches: pytest.MonkeyPatch) -> None:
    """Gloo takes nccl's part: the storages are the host's."""
    import torch.distributed as dist

    real = dist.init_process_group

    def init_process_group(backend: str | None = None, *args: Any, device_id: Any = None, **kwargs: Any) -> None:
        if device_id is not None and device_id.index is None:
            raise ValueError("device_id must have a number")
        real("gloo", *args, **kwargs)

    patches.setattr(dist, "init_process_group", init_process_group)
