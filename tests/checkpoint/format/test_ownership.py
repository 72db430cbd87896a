"""Test which process writes which tensor."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard as Placement
from torch.distributed.tensor import distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from trainer_kit.checkpoint.format import ownership
from trainer_kit.checkpoint.format.ownership import assign_writers, divide
from trainer_kit.checkpoint.format.safetensors_reader import load_tensors
from trainer_kit.checkpoint.format.safetensors_writer import write_shards

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
def test_the_writers_together_write_what_one_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int | str
) -> None:
    monkeypatch.setattr(ownership, "PART_BYTES", 1)
    tensors = make_tensors()
    division = divide({"model": tensors}, 3, limit)
    assert division.writers == 3
    files: list[str] = []
    for writer in (2, 0, 1):
        files += write_shards(division.shards["model"], tensors, tmp_path, "model", writer=writer)
    assert sorted(files) == sorted(path.name for path in tmp_path.iterdir())
    loaded = load_tensors(tmp_path)
    assert {name: tensor.tolist() for name, tensor in loaded.items()} == {
        name: tensor.tolist() for name, tensor in tensors.items()
    }
    assert loaded["a"] is loaded["tied"] or loaded["a"].data_ptr() == loaded["tied"].data_ptr()


def make_tensors() -> dict[str, torch.Tensor]:
    weight = torch.randn(4, 3)
    return {"a": weight, "b": torch.arange(5), "tied": weight, "c": torch.randn(2, 2).bfloat16(), "d": torch.ones(0)}


@pytest.mark.parametrize(
    "change",
    [
        {"b": torch.arange(6)},
        {"b": torch.arange(5).float()},
        {"b": torch.arange(5).reshape(5, 1)},
        {"tied": torch.randn(4, 3)},
        {"new": torch.ones(0)},
    ],
)
def test_processes_with_other_tensors_have_another_digest(change: dict[str, torch.Tensor]) -> None:
    digest = divide({"model": make_tensors()}, 2, "5GB").digest
    assert divide({"model": make_tensors()}, 2, "5GB").digest == digest  # whatever the values are
    assert divide({"model": {**make_tensors(), **change}}, 2, "5GB").digest != digest


def test_a_sharded_tensor_counts_whole_and_is_tied_to_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ownership, "PART_BYTES", 1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        mesh = init_device_mesh("cpu", (4,))
        rows = [distribute_tensor(torch.ones(size, 3), mesh, [Placement(0)]) for size in (2, 2, 8)]
        sharded = {"a": rows[0], "b": rows[1], "c": rows[2], "same": rows[2]}
        whole = {"a": torch.ones(2, 3), "b": torch.ones(2, 3), "c": torch.ones(8, 3)}
        whole["same"] = whole["c"]
        assert divide({"model": sharded}, 3, "5GB") == divide({"model": whole}, 3, "5GB")
    finally:
        dist.destroy_process_group()
