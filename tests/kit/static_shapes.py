"""Strategies on the CPU that want static shapes, as compilers do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from trainer_kit import SingleDevice
from trainer_kit.strategies.collectives import Collectives
from trainer_kit.strategies.device_info import DeviceInfo


class Static(SingleDevice):
    """Each new shape would cost a compilation."""

    static_shapes = True

    def __init__(self) -> None:
        super().__init__("cpu")

    def sizes(self, kind: str = "training") -> list[int]:
        """The samples of the batches of each shape that came."""
        return [next(iter(shape.columns.values()))[0][0] for shape in self.shapes.of(kind)]


class WithOperands(Static):
    """Numbers are tensors on the device, and are read one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.device_info, self.collectives = TensorScalars(self.device), ReadsOneByOne()


class TensorScalars(DeviceInfo):
    def traced_scalar(self, number: Any) -> torch.Tensor:
        return number if isinstance(number, torch.Tensor) else torch.tensor(number)


class ReadsOneByOne(Collectives):
    def read_scalars(self, scalars: Sequence[torch.Tensor], summed: bool = False) -> list[float]:
        return [scalar.item() for scalar in scalars]


class OnFour(Static):
    """A batch has `per_device_train_batch_size` samples for each of four devices."""

    devices = 4


STATIC = {"static": Static, "operands": WithOperands, "four devices": OnFour}
