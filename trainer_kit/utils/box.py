"""`Box`: the part of a tensor that one process holds."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator

import torch


@dataclasses.dataclass(frozen=True)
class Box:
    """A rectangular part of a tensor; empty if a size is 0.

    Attributes:
        shape: Shape of the whole tensor.
        offsets: First index of the part in each dimension.
        sizes: Number of indices of the part in each dimension.
    """

    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        dimensions = zip(self.shape, self.offsets, self.sizes, strict=True)
        assert all(offset >= 0 and 0 <= size <= of - offset for of, offset, size in dimensions), self

    @property
    def numel(self) -> int:
        """Number of elements of the part."""
        return math.prod(self.sizes)

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Box:
        """Return the box that is all of a tensor of this shape."""
        return cls(shape, (0,) * len(shape), shape)

    def runs(self) -> Iterator[tuple[int, int]]:
        """Yield start and length, in elements, of each run of the part in the whole tensor's row-major memory."""
        if 0 in self.sizes:
            return
        inner = len(self.shape)  # the dimensions from here on lie in one run
        while inner and self.sizes[inner - 1] == self.shape[inner - 1]:
            inner -= 1
        inner = max(inner - 1, 0)
        strides = [math.prod(self.shape[dimension + 1 :]) for dimension in range(len(self.shape))]
        first = sum(offset * stride for offset, stride in zip(self.offsets, strides, strict=True))
        length = math.prod(self.sizes[inner:])
        for index in itertools.product(*map(range, self.sizes[:inner])):
            yield first + sum(i * stride for i, stride in zip(index, strides, strict=False)), length


Part = tuple[torch.Tensor, Box]
"""A plain tensor that holds a part of another tensor, and that part."""

Placement = Callable[[torch.Tensor], Part | None]
"""Returns the part of a tensor that this process holds; None if it holds all of it."""


def unsharded(tensor: torch.Tensor) -> Part | None:
    """Return None: the placement where each process holds all of every tensor."""
    return None
