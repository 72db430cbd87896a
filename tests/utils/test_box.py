"""The part of a tensor that one process holds, and where it lies in the whole tensor's memory."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from kit.boxes import boxes, cut

from trainer_kit.utils.box import Box, unsharded


@given(boxes())
def test_the_runs_are_the_elements_of_the_part_in_their_order(box: Box) -> None:
    whole = torch.arange(math.prod(box.shape)).view(box.shape)
    found = [element for start, length in box.runs() for element in range(start, start + length)]
    assert found == cut(whole, box).flatten().tolist()


@pytest.mark.parametrize(
    ("box", "runs"),
    [
        (Box((8, 3, 5), (2, 0, 0), (4, 3, 5)), [(30, 60)]),
        (Box((8, 3, 5), (7, 1, 2), (1, 2, 3)), [(112, 3), (117, 3)]),
        (Box((4, 6), (0, 3), (4, 3)), [(3, 3), (9, 3), (15, 3), (21, 3)]),
        (Box((4, 6), (4, 0), (0, 6)), []),
        (Box.whole((4, 6)), [(0, 24)]),
        (Box.whole(()), [(0, 1)]),
    ],
)
def test_a_run_is_as_long_as_it_can_be(box: Box, runs: list[tuple[int, int]]) -> None:
    assert list(box.runs()) == runs


@pytest.mark.parametrize(("offset", "size"), [(-1, 2), (3, 2), (5, 0), (0, -1)])
def test_a_box_lies_in_its_tensor(offset: int, size: int) -> None:
    with pytest.raises(AssertionError, match=r"Box\(shape=\(4,\)"):
        Box((4,), (offset,), (size,))


def test_without_shards_each_process_holds_all() -> None:
    assert unsharded(torch.ones(2)) is None
