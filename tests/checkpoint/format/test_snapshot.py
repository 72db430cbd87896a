from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer_kit.checkpoint import Snapshot, load_tensors, read_arguments, read_state, take_snapshot, write_checkpoint
from trainer_kit.checkpoint.format import ownership

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64]
SHAPES = st.lists(st.integers(0, 4), max_size=3).map(tuple)


def copies(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor.detach().clone() for tensor in tensors]


def bits(tensor: torch.Tensor) -> Any:
    return tensor.dtype, tensor.shape, tensor.contiguous().reshape(-1).view(torch.uint8).tolist()


def groups_of_names(tensors: dict[str, torch.Tensor]) -> set[frozenset[str]]:
    """The names that share one memory."""
    found: dict[int, set[str]] = {}
    for name, tensor in tensors.items():
        found.setdefault(tensor.data_ptr() if tensor.numel() else id(tensor), set()).add(name)
    return {frozenset(names) for names in found.values()}


@st.composite
def tensors(draw: Any) -> dict[str, torch.Tensor]:
    """Tensors of any bits, some of them tied, some not contiguous."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    found: dict[str, torch.Tensor] = {}
    for name in draw(st.lists(st.sampled_from("abcdefgh"), unique=True)):
        if found and draw(st.booleans()):
            found[name] = found[draw(st.sampled_from(sorted(found)))].detach()
            continue
        dtype, shape = draw(st.sampled_from(DTYPES)), draw(SHAPES)
        size = dtype.itemsize * math.prod(shape)
        highest = 2 if dtype == torch.bool else 256
        raw = torch.randint(0, highest, (size,), dtype=torch.uint8, generator=generator)
        tensor = raw.view(dtype).reshape(shape)
        found[name] = tensor.transpose(0, -1) if len(shape) > 1 and draw(st.booleans()) else tensor
    return found


@settings(max_examples=40)
@given(model=tensors(), state=tensors(), size=st.sampled_from([8, 100, "5GB"]), copy=st.sampled_from([None, copies]))
def test_what_is_taken_and_written_is_read_bit_for_bit_and_tied_as_it_was(
    tmp_path_factory: pytest.TempPathFactory,
    model: dict[str, torch.Tensor],
    state: dict[str, torch.Tensor],
    size: int | str,
    copy: Callable[[list[torch.Tensor]], list[torch.Tensor]] | None,
) -> None:
    expected = [{name: bits(tensor) for name, tensor in each.items()} for each in (model, state)]
    snapshot = take_snapshot(1, model, {"mine": state}, arguments={})
    if copy is not None:
        snapshot = snapshot.copied(copy)
        for tensor in {id(each.untyped_storage()): each for each in (*model.values(), *state.values())}.values():
            tensor.zero_()
    path = write_checkpoint(tmp_path_factory.mktemp("run"), snapshot, max_shard_size=size)
    loaded = load_tensors(path)
    assert {name: bits(tensor) for name, tensor in loaded.items()} == expected[0]
    assert groups_of_names(loaded) == groups_of_names(model)
    of_state = read_state(path, "mine")
    assert of_state is not None
    assert {name: bits(tensor) for name, tensor in of_state.items()} == expected[1]
    assert groups_of_names(of_state) == groups_of_names(state)


def test_each_tensor_is_copied_once_and_counted_once() -> None:
    weight, other = torch.randn(4, 4), torch.randn(3)
    copied: list[torch.Tensor] = []

    def copy(given: list[torch.Tensor]) -> list[torch.Tensor]:
        copied.extend(given)
        return copies(given)

    states = {"ema": {"shadow": weight.detach()}, "optimizer": {"exp_avg": other}}
    snapshot = take_snapshot(
        1, {"a": weight, "b": weight.view(4, 4)}, states, arguments={}, more_models={"critic": {"w": other}}
    ).copied(copy)
    assert [tensor.data_ptr() for tensor in copied] == [weight.data_ptr(), other.data_ptr()]
    assert snapshot.nbytes == weight.nbytes + other.nbytes
    shadow = snapshot.states["ema"][1]["shadow"]
    assert shadow is snapshot.model["a"] is snapshot.model["b"]
    assert shadow.data_ptr() != weight.data_ptr()
    assert snapshot.more_models["critic"]["w"] is snapshot.states["optimizer"][1]["exp_avg"]


def test_nothing_that_changes_later_changes_the_snapshot(tmp_path: Path) -> None:
    weight, array = torch.zeros(2), np.zeros(2)
    state = {"history": [1.0], "array": array, "tensor": weight, "inner": {"step": 1}}
    arguments, model, files = {"betas": [0.9]}, {"weight": weight}, {"config.json": b"{}"}
    snapshot = take_snapshot(3, model, {"mine": state}, arguments=arguments, files=files).copied(copies)
    weight.fill_(9)
    array.fill(9)
    state["history"].append(9.0)  # type: ignore[attr-defined]
    state["inner"]["step"] = 9  # type: ignore[index]
    arguments["betas"].append(9.0)
    model["more"] = weight
    files["more"] = b""
    path = write_checkpoint(tmp_path, snapshot)
    saved = read_state(path, "mine")
    assert saved is not None
    assert (saved["history"], saved["inner"], saved["array"].tolist()) == ([1.0], {"step": 1}, [0, 0])
    assert saved["tensor"].tolist() == [0, 0]
    assert read_arguments(path) == {"betas": [0.9]}
    assert {name: tensor.tolist() for name, tensor in load_tensors(path).items()} == {"weight": [0, 0]}
    assert not (path / "more").exists()


def test_without_copies_it_refers_to_the_tensors_themselves() -> None:
    weight = torch.zeros(2)
    assert take_snapshot(1, {"weight": weight}, {}, arguments={}).model["weight"] is weight


def test_further_models_have_files_of_their_own(tmp_path: Path) -> None:
    snapshot = take_snapshot(1, {}, {}, arguments={}, more_models={"model_1": {"w": torch.ones(2)}})
    path = write_checkpoint(tmp_path, snapshot)
    assert load_tensors(path, "model_1")["w"].tolist() == [1, 1]


@pytest.mark.parametrize(
    "name", ["", ".", "..", "../evil", "a/b", ".hidden", "a b", "ä", "x.safetensors", "optimizer-00001-of-00002"]
)
def test_names_that_cannot_be_files_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"a state is named .* cannot be a file's name"):
        take_snapshot(1, {}, {name: {}}, arguments={})
    with pytest.raises(ValueError, match=r"a model is named .* cannot be a file's name"):
        take_snapshot(1, {}, {}, arguments={}, more_models={name: {}})


def test_names_that_differ_only_in_case_are_refused() -> None:
    with pytest.raises(ValueError, match="the states 'EMA' and 'ema' differ only in case"):
        take_snapshot(1, {}, {"EMA": {}, "ema": {}}, arguments={})
    with pytest.raises(ValueError, match="the models 'model' and 'Model' differ only in case"):
        take_snapshot(1, {}, {}, arguments={}, more_models={"Model": {}})


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"step": -1}, ValueError, "step=-1"),
        ({"arguments": {"f": print}}, TypeError, r"state\['f'\] is of type"),
        ({"arguments": {"f": [torch.ones(1)]}}, TypeError, r"arguments hold a tensor or an array \(f\.0\)"),
        ({"states": {"mine": {"a": [print]}}}, TypeError, r"state 'mine' cannot be saved: state\['a'\]\[0\] is of"),
        ({"states": {"mine": {"a": torch.eye(2).to_sparse()}}}, TypeError, "'mine' cannot be saved: tensor 'a' is sp"),
        ({"states": {"mine": torch.ones(1, device="meta")}}, ValueError, "'mine' cannot be saved: .* device 'meta'"),
        ({"model_state": {"w": torch.eye(2).to_sparse()}}, TypeError, "tensor 'w' is sparse"),
        ({"model_state": {"w": print}}, TypeError, r"'model_values' cannot be saved: state\['w'\] is of type"),
        ({"more_models": {"critic": {"w": print}}}, TypeError, r"'critic_values' cannot be saved: state\['w'\] is of"),
    ],
)
def test_what_a_checkpoint_cannot_hold_is_refused(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    given = {"step": 1, "model_state": {"ok": torch.ones(1)}, "states": {}, "arguments": {}, **options}
    with pytest.raises(error, match=message):
        take_snapshot(**given)


def test_a_snapshot_is_fixed() -> None:
    snapshot = take_snapshot(1, {}, {}, arguments={})
    with pytest.raises(AttributeError):
        snapshot.step = 2  # type: ignore[misc]
    assert isinstance(snapshot, Snapshot)


def test_each_writer_copies_its_own_tensors_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ownership, "PART_BYTES", 1)
    weight = torch.ones(8)
    model = {"a": weight, "tied": weight, "b": torch.ones(6)}
    states = {"optimizer": {"m": torch.ones(4), "n": torch.ones(2)}, "mine": {"x": torch.ones(3)}}
    snapshot = take_snapshot(1, model, states, arguments={})
    division = snapshot.divide(["optimizer"], 2, "5GB")
    assert list(division.shards) == ["model", "state/optimizer"]
    taken: list[list[int]] = []

    def copy(given: list[torch.Tensor]) -> list[torch.Tensor]:
        taken.append(sorted(len(tensor) for tensor in given))
        return copies(given)

    shares = [snapshot._replace(division=division, writer=writer).copied(copy) for writer in (0, 1)]
    assert taken == [[2, 3, 8], [4, 6]]  # the first one has what is not divided too
    assert shares[0].model["a"] is shares[0].model["tied"]
    assert shares[0].model["a"] is not weight
    assert shares[0].model["b"] is model["b"]
