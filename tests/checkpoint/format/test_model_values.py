from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.valued import SETTINGS, Valued

from trainer_kit.checkpoint import CheckpointError, load_checkpoint_in_model, take_snapshot, write_checkpoint
from trainer_kit.checkpoint.format.export import save_model_folder
from trainer_kit.checkpoint.format.model_values import read_values, split_values, write_values


def exact(value: Any) -> str:
    """Text that differs for values of other types or bits."""
    return repr(value)


def checkpoint(folder: Path, model: Any, stem: str = "model") -> Path:
    given = {"more_models": {stem: model.state_dict()}} if stem != "model" else {}
    state = None if given else model.state_dict()
    return write_checkpoint(folder, take_snapshot(1, state, {}, arguments={}, **given))


def trained() -> Valued:
    model = Valued()
    model.counter.passes, model.counter.last = 7, torch.tensor([0.5, 2.0])
    return model


def test_the_entries_of_a_state_dict_are_divided() -> None:
    tensors, values = split_values(Valued().state_dict())
    assert tensors.keys() == {"linear.weight", "linear.bias"}
    assert values.keys() == {"counter._extra_state", "_metadata"}


@pytest.mark.parametrize("form", ["checkpoint", "folder"])
def test_values_come_back_exactly(tmp_path: Path, form: str) -> None:
    model, other = trained(), Valued()
    if form == "checkpoint":
        folder = checkpoint(tmp_path, model)
        assert (folder / "state" / "model_values.json").is_file()
    else:
        folder = tmp_path / "saved"
        save_model_folder(folder, model.state_dict(), model, None, "5GB")
        assert {each.name for each in folder.iterdir()} == {
            "model.safetensors", "model_values.json", "model_values.safetensors"
        }  # fmt: skip
    load_checkpoint_in_model(other, folder)
    assert exact(other.loaded) == exact(SETTINGS)
    assert other.counter.passes == 7
    assert torch.equal(other.counter.last, model.counter.last)
    assert torch.equal(other.linear.weight, model.linear.weight)


def test_every_file_of_a_sharded_model_comes_with_all_values(tmp_path: Path) -> None:
    model, other = trained(), Valued()
    save_model_folder(tmp_path, model.state_dict(), model, None, 8)
    assert len(list(tmp_path.glob("model-*.safetensors"))) == 2
    load_checkpoint_in_model(other, tmp_path)
    assert (exact(other.loaded), other.counter.passes) == (exact(SETTINGS), 7)


def test_the_values_of_further_models_have_their_stem(tmp_path: Path) -> None:
    folder, other = checkpoint(tmp_path, trained(), "model_1"), Valued()
    load_checkpoint_in_model(other, folder, stem="model_1")
    assert other.counter.passes == 7
    assert read_values(folder, "model", is_verified=False) == {}


def test_values_of_a_model_that_was_there_before_are_removed(tmp_path: Path) -> None:
    write_values(tmp_path, {"a": {"t": torch.ones(1)}})
    write_values(tmp_path, {"a": 1})
    assert [each.name for each in tmp_path.iterdir()] == ["model_values.json"]
    assert read_values(tmp_path, "model", is_verified=False) == {"a": 1}
    write_values(tmp_path, {})
    assert not [*tmp_path.iterdir()]
    assert read_values(tmp_path, "model", is_verified=False) is None


@pytest.mark.parametrize("content", ["[]", '{"a": {"__kind__": "tensor", "value": "a"}}', '{"a"'])
def test_damaged_values_are_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "model_values.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"model_values\.json"):
        read_values(tmp_path, "model", is_verified=False)


def test_the_checksum_of_values_is_compared(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, trained())
    path = folder / "state" / "model_values.json"
    path.write_text(path.read_text().replace("7", "8"))
    with pytest.raises(CheckpointError, match=r"model_values\.json is damaged: its checksum"):
        load_checkpoint_in_model(Valued(), folder)


@pytest.mark.parametrize("own", [False, True])
def test_values_that_only_one_side_has_are_refused(tmp_path: Path, own: bool) -> None:
    plain = torch.nn.ModuleDict({"linear": torch.nn.Linear(3, 2)})
    saved, model = (plain, Valued()) if own else (Valued(), plain)
    with pytest.raises(ValueError, match=f"{'missing there' if own else 'not in the model'}: .*'counter._extra_state'"):
        load_checkpoint_in_model(model, checkpoint(tmp_path, saved))


def test_weights_of_other_tools_may_lack_values(tmp_path: Path) -> None:
    model = trained()
    model.load_state_dict = torch.nn.Module.load_state_dict.__get__(model)  # type: ignore[method-assign]
    save_model_folder(tmp_path, split_values(model.state_dict())[0], model, None, "5GB")
    load_checkpoint_in_model(model, tmp_path)
    assert model.counter.passes == 7


@pytest.mark.parametrize("value", [{"f": len}, {"k": object()}, {"c": torch.nn.Linear}], ids=["f", "k", "c"])
def test_values_that_cannot_be_kept_are_named(tmp_path: Path, value: Any) -> None:
    model, key = Valued(value), next(iter(value))
    with pytest.raises(TypeError, match=rf"\['_metadata'\]\['{key}'\] is of type builtins\."):
        save_model_folder(tmp_path / "saved", model.state_dict(), model, None, "5GB")
    assert not (tmp_path / "saved").exists()
    with pytest.raises(TypeError, match=rf"'model_values' cannot be saved: state\['_metadata'\]\['{key}'\] is of type"):
        take_snapshot(1, model.state_dict(), {}, arguments={})


class Growing(torch.nn.Module):
    """Its extra state is None first, and then a tensor of any length."""

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.linear, self.state = torch.nn.Linear(1, 1), state

    def get_extra_state(self) -> Any:
        return self.state

    def set_extra_state(self, state: Any) -> None:
        self.state = state


@pytest.mark.parametrize("before", [None, torch.zeros(1), torch.zeros(3)], ids=str)
@pytest.mark.parametrize("after", [None, torch.ones(3)], ids=str)
@pytest.mark.parametrize("size", ["5GB", 1])
def test_an_extra_state_may_be_a_tensor_in_one_checkpoint(
    tmp_path: Path, before: Any, after: Any, size: int | str
) -> None:
    made = Growing(before)
    snapshot = take_snapshot(1, Growing(after).state_dict(), {}, arguments={})
    load_checkpoint_in_model(made, write_checkpoint(tmp_path, snapshot, max_shard_size=size))
    assert made.state is None if after is None else torch.equal(made.state, after)
    if isinstance(before, torch.Tensor):
        assert not before.any()


def test_values_are_json(tmp_path: Path) -> None:
    write_values(tmp_path, SETTINGS)
    assert json.loads((tmp_path / "model_values.json").read_text())["name"] == "ä"
