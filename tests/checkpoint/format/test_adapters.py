"""Adapters: their folders and files, and the names under which peft and the model find each tensor."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from kit.fake_peft import FakePeftModel, fake_peft

from trainer_kit.checkpoint import load_tensors, save_tensors
from trainer_kit.checkpoint.format.adapters import (
    adapter_config_files,
    adapter_folders,
    adapter_stems,
    adapter_tensors,
    base_name,
    frozen_names,
    split_state,
    with_model_names,
)
from trainer_kit.checkpoint.format.safetensors_reader import load_source, sources


@pytest.fixture(autouse=True)
def peft(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", fake_peft())


def test_a_model_without_adapters_has_no_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    assert adapter_folders(torch.nn.Linear(1, 1)) == {}
    monkeypatch.delitem(sys.modules, "peft")
    assert adapter_folders(FakePeftModel("default")) == {}


def test_each_adapter_has_a_folder_and_the_default_one_that_of_the_model() -> None:
    model = torch.nn.DataParallel(FakePeftModel("default", "b"))
    assert adapter_folders(model) == {"default": "", "b": "b"}
    assert adapter_stems(model) == {"default": "adapter_model", "b": "b/adapter_model"}


def test_an_adapter_named_like_a_folder_of_checkpoints_is_refused() -> None:
    with pytest.raises(ValueError, match="an adapter is named 'state', as a folder of each checkpoint is; rename it"):
        adapter_folders(FakePeftModel("state"))


def test_the_configuration_is_that_of_a_loaded_adapter_and_the_same_each_time() -> None:
    model = FakePeftModel("default", "b")
    model.name_or_path = "someone/base"
    files = adapter_config_files(model)
    assert files.keys() == {"adapter_config.json", "b/adapter_config.json"}
    content = json.loads(files["adapter_config.json"])
    assert (content["inference_mode"], content["base_model_name_or_path"]) == (True, "someone/base")
    assert content["target_modules"] == ["a", "b"]
    assert content["auto_mapping"] == {"base_model_class": "FakePeftModel", "parent_library": "kit.fake_peft"}
    assert model.peft_config["default"].target_modules == {"a", "b"}
    assert not model.peft_config["default"].inference_mode


def test_the_name_of_the_base_is_its_own_else_that_of_an_adapter() -> None:
    model = FakePeftModel("default")
    assert base_name(model) is None
    model.peft_config["default"].base_model_name_or_path = "by/config"
    assert base_name(model) == "by/config"
    model.name_or_path = "by/model"
    assert base_name(model) == "by/model"


def test_files_have_both_names_and_the_rest_has_neither_adapters_nor_base(tmp_path: Path) -> None:
    model = FakePeftModel("default", "b")
    state = model.state_dict()
    assert frozen_names(model) == {"base_layer.weight", "base_layer.bias"}
    rest, files = split_state(model, state, {"base_layer.weight"})
    assert rest.keys() == {"base_layer.bias", "count"}
    assert {stem: [*tensors] for stem, tensors in files.items()} == {
        "adapter_model": ["lora", "lora.default"],
        "b/adapter_model": ["lora", "lora.b"],
    }
    save_tensors(files["adapter_model"], tmp_path, "adapter_model")
    assert [*sources(tmp_path, "adapter_model")[0].entries] == ["lora"]  # all that peft reads
    assert torch.equal(load_tensors(tmp_path, "adapter_model")["lora.default"], state["lora.default"])


def test_a_file_is_read_by_the_names_of_the_model(tmp_path: Path) -> None:
    tied, own, computed = torch.ones(2), torch.zeros(3), torch.ones(4)
    save_tensors({"p": tied, "x.p": tied, "y.p": tied, "bias": own, "computed": computed}, tmp_path, "adapter_model")
    (source,) = sources(tmp_path, "adapter_model")
    found = load_source(with_model_names(source, {"x.p", "bias", "other"}))
    assert found.keys() == {"x.p", "y.p", "bias"}  # a name that the model lacks is reported later
    assert torch.equal(found["y.p"], tied)


def test_each_name_of_peft_is_stored_even_if_two_are_tied(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    module = fake_peft()
    module.get_peft_model_state_dict = lambda model, state, *_, **__: {  # type: ignore[attr-defined]
        "one": state["lora.default"],
        "two": state["lora.default"],
    }
    monkeypatch.setitem(sys.modules, "peft", module)
    model = FakePeftModel("default")
    save_tensors(adapter_tensors(model, model.state_dict())["adapter_model"], tmp_path, "adapter_model")
    assert sources(tmp_path, "adapter_model")[0].entries.keys() == {"one", "two"}
