"""`XLADeviceInfo`: memory, compilations, random numbers and host copies of XLA devices."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import torch

from trainer_kit.strategies.device_info import DeviceInfo
from trainer_kit.strategies.xla.mesh import Division
from trainer_kit.utils.units import GIB

NOT_REPORTED = "not reported by this device"


class XLADeviceInfo(DeviceInfo):
    """The XLA devices of this host.

    Args:
        device: The XLA device, which stands for all devices of the program.

    Attributes:
        division: Sharding of tensors over the devices; None if the host's devices hold full tensors.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.division: Division | None = None

    def memory(self) -> dict[str, Any]:
        """Return `memory_gib` in use on the first device and `peak_memory_gib`, or `NOT_REPORTED` for both."""
        try:
            info = self._model().get_memory_info(self.device)
        except RuntimeError:
            return {"memory_gib": NOT_REPORTED, "peak_memory_gib": NOT_REPORTED}
        return {"memory_gib": info["bytes_used"] / GIB, "peak_memory_gib": info["peak_bytes_used"] / GIB}

    def empty_cache(self) -> None:
        """Do nothing, since XLA has no cache to empty."""

    def rng_state(self) -> int:
        state: int = self._model().get_rng_state(str(self.device))
        return state

    def set_rng_state(self, state: Any) -> None:
        if isinstance(state, int):
            self._model().set_rng_state(state, str(self.device))

    def compilations(self) -> tuple[int, float]:
        data = importlib.import_module("torch_xla.debug.metrics").metric_data("CompileTime")
        return (data[0], data[1] / 1e9) if data is not None else (0, 0.0)

    def traced_scalar(self, number: Any) -> Any:
        """Return the number in a tensor on the device; XLA compiles a Python number such as 0 or 1 as a constant."""
        if isinstance(number, torch.Tensor):
            return number
        return self._model().send_cpu_data_to_device([torch.tensor(number)], self.device)[0]

    def mark_step(self) -> None:
        state = self.rng_state()
        importlib.import_module("torch_xla").sync()
        self.set_rng_state(state)  # sync() changes it, so random numbers would depend on the number of calls

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.division is None or tensor.device.type != "xla":
            return tensor.cpu()
        return self.division.joined(tensor)

    def copy_to_host(self, tensors: Sequence[torch.Tensor], places: Sequence[torch.Tensor], moment: Any = None) -> None:
        for tensor, place in zip(tensors, places, strict=True):
            place.copy_(self.to_host(tensor.detach()))

    def _model(self) -> Any:
        return importlib.import_module("torch_xla.core.xla_model")
