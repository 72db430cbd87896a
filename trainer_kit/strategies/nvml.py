"""GPU memory as NVIDIA's management library (NVML) reports it, including that of other processes."""

from __future__ import annotations

import functools
import os
from typing import Any

from trainer_kit.utils.units import GIB


def card_memory(properties: Any) -> dict[str, float]:
    """Return the memory in use on a GPU in GiB; an empty dict if NVML is missing or fails.

    Args:
        properties: The GPU's `torch.cuda.get_device_properties`.

    Returns:
        `device_memory_gib` in use on the whole GPU by all processes, and `process_memory_gib` by this process, CUDA's
        context and libraries included. The latter is absent if the driver knows this process by another PID, as it
        may in a container.
    """
    found = _card(str(getattr(properties, "uuid", "")).removeprefix("GPU-"))
    if found is None:
        return {}
    nvml, card = found
    try:
        figures = {"device_memory_gib": nvml.nvmlDeviceGetMemoryInfo(card).used / GIB}
        own = [each for each in nvml.nvmlDeviceGetComputeRunningProcesses(card) if each.pid == os.getpid()]
    except nvml.NVMLError:
        return {}
    if own and own[0].usedGpuMemory is not None:  # None on Windows
        figures["process_memory_gib"] = own[0].usedGpuMemory / GIB
    return figures


@functools.cache
def _card(uuid: str) -> tuple[Any, Any] | None:
    """Return NVML and its handle of a GPU, found by UUID: CUDA numbers only the visible GPUs."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        return pynvml, pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
    except pynvml.NVMLError:
        return None
