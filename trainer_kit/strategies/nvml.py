"""What NVIDIA's management library (NVML) tells of a GPU, which torch does not: memory that others use too."""

from __future__ import annotations

import functools
import os
from typing import Any

from trainer_kit.strategies.device_info import GIB


def card_memory(properties: Any) -> dict[str, float]:
    """Memory of a GPU in GiB, as far as NVML can be asked; nothing where it is missing or fails.

    Args:
        properties: As torch.cuda.get_device_properties gives them.

    Returns:
        `device_memory_gib` in use on the whole card, by whomever, and `process_memory_gib` by this process: torch's
        allocator, CUDA's own context, libraries. In a container the driver may know this process by another number;
        that figure is left out then.
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
    if own and own[0].usedGpuMemory is not None:  # Windows does not tell
        figures["process_memory_gib"] = own[0].usedGpuMemory / GIB
    return figures


@functools.cache
def _card(uuid: str) -> tuple[Any, Any] | None:
    """NVML and its name for a GPU, by the number that both know: CUDA counts only the GPUs that it is shown."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        return pynvml, pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
    except pynvml.NVMLError:
        return None
