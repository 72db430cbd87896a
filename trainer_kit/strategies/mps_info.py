"""`MpsInfo`: memory of an Apple GPU."""

from __future__ import annotations

from typing import Any

import torch

from trainer_kit.strategies.device_info import DeviceInfo
from trainer_kit.utils.units import GIB


class MpsInfo(DeviceInfo):
    """The GPU of a Mac."""

    def memory(self) -> dict[str, Any]:
        """Return `memory_gib` in tensors and the process's `peak_memory_gib`, since the driver keeps no peak."""
        return super().memory() | {"memory_gib": torch.mps.current_allocated_memory() / GIB}

    def free_memory(self) -> int:
        return torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory()
