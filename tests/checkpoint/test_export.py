from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from trainer_kit.checkpoint.export import save_model_folder, save_pretrained_files


class Tokenizer:
    def save_pretrained(self, directory: Path) -> None:
        (directory / "tokenizer.json").write_text("{}")


def state(size: int) -> dict[str, torch.Tensor]:
    return {f"layer.{number}": torch.full((size,), float(number)) for number in range(4)}


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_a_plain_module_leaves_its_weights_only(tmp_path: Path) -> None:
    save_model_folder(tmp_path / "new" / "model", state(3), torch.nn.Linear(1, 1), None, "5GB")
    assert names(tmp_path / "new" / "model") == ["model.safetensors"]


def test_a_smaller_model_leaves_no_shard_of_the_one_before(tmp_path: Path) -> None:
    (tmp_path / "model_of_mine.safetensors").write_bytes(b"mine")
    save_model_folder(tmp_path, state(100), torch.nn.Linear(1, 1), None, 500)
    assert len(list(tmp_path.glob("model-*.safetensors"))) == 4
    save_model_folder(tmp_path, state(2), torch.nn.Linear(1, 1), Tokenizer(), "5GB")
    assert names(tmp_path) == ["model.safetensors", "model_of_mine.safetensors", "tokenizer.json"]
    loaded = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(loaded[name], tensor) for name, tensor in state(2).items())


def test_the_configuration_names_the_class_and_stays_as_it_is(tmp_path: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(vocab_size=11, n_positions=8, n_embd=4, n_layer=1, n_head=1))
    before: Any = model.config.architectures
    save_pretrained_files(model, Tokenizer(), tmp_path)
    assert {"config.json", "generation_config.json", "tokenizer.json"} <= set(names(tmp_path))
    assert GPT2Config.from_pretrained(tmp_path).architectures == ["GPT2LMHeadModel"]
    assert model.config.architectures == before


def test_a_bad_size_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="max_shard_size='huge'"):
        save_model_folder(tmp_path, state(1), torch.nn.Linear(1, 1), None, "huge")
