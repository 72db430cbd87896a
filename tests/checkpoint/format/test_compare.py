"""What two checkpoints differ in is found and measured; what is equal is not named."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from trainer_kit.checkpoint import CheckpointError, take_snapshot, write_checkpoint
from trainer_kit.checkpoint.format import compare as comparing
from trainer_kit.checkpoint.format.compare import Comparison, compare


def save(output_dir: Path, weights: dict[str, torch.Tensor], max_shard_size: int = 10**9, **states: Any) -> Path:
    snapshot = take_snapshot(1, weights, states, arguments={"lr": 0.1}, files={"config.json": b"{}"})
    return write_checkpoint(output_dir, snapshot, max_shard_size=max_shard_size)


def of_weights(tmp_path: Path, a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> Comparison:
    return compare(save(tmp_path / "a", a), save(tmp_path / "b", b))


def test_what_was_saved_alike_is_equal_though_shards_and_ties_differ(tmp_path: Path) -> None:
    x, y = torch.randn(40), torch.tensor([float("nan"), 1.0])
    state = {"rate": float("nan"), "betas": (0.9, 0.99), "state": {0: {"exp_avg": torch.randn(3), "step": 3}}}
    a = save(tmp_path / "a", {"x": x, "y": y, "tied": x}, optimizer=state)
    b = save(tmp_path / "b", {"x": x, "y": y, "tied": x.clone()}, max_shard_size=100, optimizer=state)
    found = compare(a, b)
    assert found.is_equal
    assert found.tensors == 4
    assert compare(a, a).tensors == 3


@pytest.mark.parametrize("piece", [3, 1000])
def test_a_difference_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece: int) -> None:
    monkeypatch.setattr(comparing, "_PIECE", piece)
    a = torch.tensor([1.0, -8.0, 3.0, 4.0, 5.0, 6.0, 7.0, 0.0])
    b = a.clone()
    b[2], b[6], b[7] = 3.5, 5.0, -0.0
    found = of_weights(tmp_path, {"x": a, "same": a}, {"x": b, "same": a})
    [each] = found.differing
    assert (each.name, each.elements, each.differing) == ("model: x", 8, 3)
    assert (each.largest, each.relative, each.nans) == (2.0, 0.25, (0, 0))
    assert not found.is_equal


def test_the_largest_relative_difference_comes_first_and_nan_before_it(tmp_path: Path) -> None:
    a = {"large": torch.tensor([100.0, 1.0]), "small": torch.tensor([0.01, 1e-4]), "bad": torch.tensor([1.0, 2.0])}
    b = {
        "large": torch.tensor([101.0, 1.0]),
        "small": torch.tensor([0.02, 1e-4]),
        "bad": torch.tensor([float("nan"), 2.0]),
    }
    found = of_weights(tmp_path, a, b)
    assert [each.name for each in found.differing] == ["model: bad", "model: small", "model: large"]
    assert (found.differing[0].nans, found.differing[0].largest) == ((0, 1), 0.0)
    assert found.differing[2].relative == pytest.approx(1 / 101)


@pytest.mark.parametrize(
    ("a", "b", "largest"),
    [
        (torch.tensor([1.0, math.inf]), torch.tensor([1.0, 2.0]), math.inf),
        (torch.tensor(3), torch.tensor(5), 2),
        (torch.tensor([True, False]), torch.tensor([True, True]), 1),
        (torch.tensor([3 + 4j], dtype=torch.complex128), torch.tensor([0j], dtype=torch.complex128), 5),
        (torch.tensor([1.5, 2.0], dtype=torch.bfloat16), torch.tensor([1.0, 2.0], dtype=torch.bfloat16), 0.5),
        (torch.tensor([8.0]).to(torch.float8_e4m3fn), torch.tensor([4.0]).to(torch.float8_e4m3fn), 4),
    ],
)
def test_every_kind_of_number_is_compared(tmp_path: Path, a: torch.Tensor, b: torch.Tensor, largest: float) -> None:
    [each] = of_weights(tmp_path, {"x": a, "none": torch.empty(0)}, {"x": b, "none": torch.empty(0)}).differing
    assert (each.differing, each.largest) == (1, largest)


def test_an_infinite_element_does_not_make_others_small(tmp_path: Path) -> None:
    a, b = torch.tensor([math.inf, 2.0]), torch.tensor([math.inf, 1.0])
    [each] = of_weights(tmp_path, {"x": a}, {"x": b}).differing
    assert (each.differing, each.largest, each.relative) == (1, 1.0, 0.5)


def test_another_shape_dtype_or_name_is_told_apart(tmp_path: Path) -> None:
    a = {"shape": torch.zeros(2), "dtype": torch.zeros(2), "gone": torch.zeros(1)}
    b = {"shape": torch.zeros(2, 1), "dtype": torch.zeros(2).double(), "new": torch.zeros(1)}
    found = of_weights(tmp_path, a, b)
    assert found.changed == {
        "model: shape": ("float32 [2]", "float32 [2, 1]"),
        "model: dtype": ("float32 [2]", "float64 [2]"),
    }
    assert found.only_in == (["model: gone"], ["model: new"])
    assert not found.differing


def test_states_arguments_and_files_are_compared(tmp_path: Path) -> None:
    weights = {"x": torch.zeros(2)}
    groups = [{"lr": 0.1, "betas": (0.9, 0.99)}]
    a = save(tmp_path / "a", weights, optimizer={"groups": groups, "state": {0: torch.zeros(3)}}, ema={"d": 1})
    changed = {"groups": [{"lr": 0.2, "betas": (0.9, 0.999)}], "state": {0: torch.ones(3)}, "more": None}
    snapshot = take_snapshot(1, weights, {"optimizer": changed}, arguments={"lr": 1.0}, files={"config.json": b"{1}"})
    found = compare(a, write_checkpoint(tmp_path / "b", snapshot))
    assert found.values == {
        "arguments: lr": (0.1, 1.0),
        "state/optimizer: groups.0.lr": (0.1, 0.2),
        "state/optimizer: groups.0.betas": ((0.9, 0.99), (0.9, 0.999)),
    }
    assert [each.name for each in found.differing] == ["state/optimizer: state.0"]
    assert found.files == ["config.json"]
    assert found.only_in == (["state/ema.json"], ["state/optimizer: more"])


def test_a_damaged_one_is_not_compared(tmp_path: Path) -> None:
    a, b = (save(tmp_path / name, {"x": torch.zeros(9)}) for name in "ab")
    path = b / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\1")
    with pytest.raises(CheckpointError, match=r"b/checkpoint-1/model\.safetensors is damaged"):
        compare(a, b)


def test_one_tensor_of_each_is_in_memory_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from trainer_kit.checkpoint.format.safetensors_reader import load_tensor

    loaded: list[str] = []
    monkeypatch.setattr(comparing, "load_tensor", lambda source, name: loaded.append(name) or load_tensor(source, name))
    of_weights(tmp_path, {"x": torch.zeros(2), "y": torch.ones(2)}, {"x": torch.zeros(2), "y": torch.ones(2)})
    assert loaded == ["x", "x", "y", "y"]
