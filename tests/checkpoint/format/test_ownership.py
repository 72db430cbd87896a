"""Test which process writes which tensor."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainer_kit.checkpoint.format import ownership
from trainer_kit.checkpoint.format.ownership import assign_writers
from trainer_kit.checkpoint.format.safetensors_reader import load_tensors
from trainer_kit.checkpoint.format.safetensors_writer import save_tensors

SIZES = st.dictionaries(st.text("abc", min_size=1, max_size=3), st.integers(0, 5 * ownership.PART_BYTES), max_size=20)


@given(groups=st.lists(SIZES, min_size=1, max_size=3), writers=st.integers(1, 5))
def test_each_tensor_has_one_writer_and_the_work_is_even(groups: list[dict[str, int]], writers: int) -> None:
    owners = assign_writers(groups, writers)
    assert [set(group) for group in groups] == [set(owner) for owner in owners]
    loads = [0] * writers
    for group, owner in zip(groups, owners, strict=True):
        for name, size in group.items():
            loads[owner[name]] += size
    total, largest = sum(loads), max((size for group in groups for size in group.values()), default=0)
    used = min(writers, max(1, total // ownership.PART_BYTES))
    assert max(loads) <= total / used + largest
    assert not any(loads[used:])
    assert assign_writers([dict(reversed(group.items())) for group in groups], writers) == owners


def test_a_small_checkpoint_has_one_writer() -> None:
    assert assign_writers([{"a": 5, "b": ownership.PART_BYTES}], 8) == [{"a": 0, "b": 0}]


@pytest.mark.parametrize("limit", ["5GB", 40])
def test_the_writers_together_write_what_one_writes(tmp_path: Path, limit: int | str) -> None:
    weight = torch.randn(4, 3)
    tensors = {"a": weight, "b": torch.arange(5), "tied": weight, "c": torch.randn(2, 2).bfloat16(), "d": torch.ones(0)}
    owners = {"a": 1, "tied": 1, "b": 2, "c": 0, "d": 0}
    files: list[str] = []
    for writer in (2, 0, 1):
        files += save_tensors(tensors, tmp_path, "model", limit, owners=owners, writer=writer)
    assert sorted(files) == sorted(path.name for path in tmp_path.iterdir())
    loaded = load_tensors(tmp_path)
    assert {name: tensor.tolist() for name, tensor in loaded.items()} == {
        name: tensor.tolist() for name, tensor in tensors.items()
    }
    assert loaded["a"] is loaded["tied"] or loaded["a"].data_ptr() == loaded["tied"].data_ptr()
