"""Strategies on the CPU that want static shapes, as compilers do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from trainer_kit import SingleDevice


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

    def operand(self, number: Any) -> torch.Tensor:
        return number if isinstance(number, torch.Tensor) else torch.tensor(number)

    def read(self, scalars: Sequence[torch.Tensor], summed: bool = False) -> list[float]:
        return [scalar.item() for scalar in scalars]


class OnFour(Static):
    """A batch has `per_device_train_batch_size` samples for each of four devices."""

    devices = 4


STATIC = {"static": Static, "operands": WithOperands, "four devices": OnFour}
