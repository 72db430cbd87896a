"""Parts of tensors: random ones, and what a placement gives without processes."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import strategies as st

from trainer_kit.checkpoint.format import safetensors_reader
from trainer_kit.utils.box import Box, Part, Placement


@st.composite
def boxes(draw: st.DrawFn) -> Box:
    """Boxes in tensors of up to four dimensions, empty ones too."""
    shape = tuple(draw(st.lists(st.integers(0, 6), max_size=4)))
    offsets = tuple(draw(st.integers(0, size)) for size in shape)
    sizes = tuple(draw(st.integers(0, size - offset)) for size, offset in zip(shape, offsets, strict=True))
    return Box(shape, offsets, sizes)


def cut(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    """The box as a view of the whole tensor."""
    for dimension, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
        tensor = tensor.narrow(dimension, offset, size)
    return tensor


def rows(shape: tuple[int, ...], rank: int, count: int) -> Box:
    """The rows of one rank of `count`, as torch divides them: the last ranks may have none."""
    each = -(-shape[0] // count)
    first = min(rank * each, shape[0])
    return Box(tuple(shape), (first, *(0 for _ in shape[1:])), (min(each, shape[0] - first), *shape[1:]))


def rows_of(rank: int, count: int) -> Placement:
    """A placement where a tensor's rows are a view of it; one without dimensions is whole."""

    def placement(tensor: torch.Tensor) -> Part | None:
        if not tensor.ndim:
            return None
        box = rows(tuple(tensor.shape), rank, count)
        return cut(tensor.detach(), box), box

    return placement


class Reads:
    """What is read of files' tensors: (position in the file, bytes) of each read."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.found: list[tuple[int, int]] = []

        class Counted(io.FileIO):
            def readinto(file, view: Any) -> int:  # noqa: N805  # self is the Reads
                position = file.tell()
                count = super().readinto(view) or 0
                self.found.append((position, count))
                return count

        def opened(path: Path, mode: str, buffering: int = -1) -> Any:
            return Counted(path, mode) if buffering == 0 else open(path, mode, buffering)

        monkeypatch.setattr(safetensors_reader, "open", opened, raising=False)

    @property
    def nbytes(self) -> int:
        return sum(count for _, count in self.found)
