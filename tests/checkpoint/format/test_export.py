from __future__ import annotations

import errno
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.fake_peft import FakePeftModel, fake_peft
from safetensors.torch import load_file

from trainer_kit.checkpoint import pretrained_files
from trainer_kit.checkpoint.format.export import save_model_folder


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
    save_model_folder(tmp_path, model.state_dict(), model, Tokenizer(), "5GB")
    assert {"config.json", "generation_config.json", "tokenizer.json"} <= set(names(tmp_path))
    assert GPT2Config.from_pretrained(tmp_path).architectures == ["GPT2LMHeadModel"]
    assert model.config.architectures == before


class Processor:
    """One whose files lie in a folder of their own too."""

    def save_pretrained(self, directory: Path) -> None:
        (directory / "chat_templates").mkdir()
        (directory / "chat_templates" / "default.jinja").write_text("hello")
        (directory / "processor.json").write_text("{}")


def test_the_files_and_their_contents(tmp_path: Path) -> None:
    expected = {"chat_templates/default.jinja": b"hello", "processor.json": b"{}"}
    assert pretrained_files(torch.nn.Linear(1, 1), Processor()) == expected
    assert pretrained_files(torch.nn.Linear(1, 1), None) == {}
    save_model_folder(tmp_path, state(1), torch.nn.Linear(1, 1), Processor(), "5GB")
    assert (tmp_path / "chat_templates" / "default.jinja").read_bytes() == b"hello"


class Failing:
    def __init__(self, error: Exception) -> None:
        self.error = error

    def save_pretrained(self, directory: Path) -> None:
        raise self.error


def test_a_full_disk_met_by_the_tokenizers_code_is_an_oserror() -> None:
    error = Exception("No space left on device (os error 28)")  # as tokenizers raises it
    with pytest.raises(OSError, match=r"No space left on device: '.*trainer_kit-") as caught:
        pretrained_files(torch.nn.Linear(1, 1), Failing(error))
    assert caught.value.errno == errno.ENOSPC
    assert caught.value.__cause__ is error


@pytest.mark.parametrize("error", [ValueError("bad vocabulary"), OSError(errno.EIO, "Input/output error")])
def test_another_error_of_a_tokenizer_stays_what_it_is(error: Exception) -> None:
    with pytest.raises(type(error)) as caught:
        pretrained_files(torch.nn.Linear(1, 1), Failing(error))
    assert caught.value is error


def test_the_real_tokenizers_code_reports_a_full_disk_so(tmp_path: Path) -> None:
    if not os.path.exists("/dev/full"):
        pytest.skip("needs /dev/full")
    from tokenizers import Tokenizer as RealTokenizer
    from tokenizers.models import WordLevel

    class OnAFullDisk:
        def save_pretrained(self, directory: Path) -> None:
            RealTokenizer(WordLevel({"a": 0}, unk_token="a")).save("/dev/full")

    with pytest.raises(OSError, match="No space left on device") as caught:
        pretrained_files(torch.nn.Linear(1, 1), OnAFullDisk())
    assert caught.value.errno == errno.ENOSPC


def test_a_bad_size_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="max_shard_size='huge'"):
        save_model_folder(tmp_path, state(1), torch.nn.Linear(1, 1), None, "huge")


class OfAnotherLibrary(torch.nn.Linear):
    """A model with a format of its own."""

    file = "own/weights.safetensors"

    def save_pretrained(self, folder: str) -> None:
        path = Path(folder) / self.file
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"mine")


def test_a_model_of_another_library_writes_its_own_folder(tmp_path: Path) -> None:
    model = OfAnotherLibrary(1, 1)
    save_model_folder(
        tmp_path, model.state_dict(), torch.nn.DataParallel(model), Tokenizer(), "5GB", uses_own_format=True
    )
    assert names(tmp_path) == ["own", "tokenizer.json"]
    assert names(tmp_path / "own") == ["weights.safetensors"]


def test_a_pickle_of_another_library_is_refused(tmp_path: Path) -> None:
    model = OfAnotherLibrary(1, 1)
    model.file = "own/weights.bin"
    with pytest.raises(
        ValueError, match=r"OfAnotherLibrary.save_pretrained writes own/weights.bin, which holds a pickle"
    ):
        save_model_folder(tmp_path, model.state_dict(), model, None, "5GB", uses_own_format=True)
    assert names(tmp_path) == []


def test_adapters_replace_the_weights_that_a_folder_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", fake_peft())
    save_model_folder(tmp_path, state(100), torch.nn.Linear(1, 1), None, 500)
    model = FakePeftModel("default", "b")
    save_model_folder(tmp_path, model.state_dict(), model, Tokenizer(), 8)
    expected = ["adapter_config.json", "adapter_model.safetensors", "b", "model.safetensors", "tokenizer.json"]
    assert names(tmp_path) == expected
    assert load_file(tmp_path / "model.safetensors").keys() == {"count"}
    assert torch.equal(load_file(tmp_path / "b" / "adapter_model.safetensors")["lora"], model.lora["b"])
    assert pretrained_files(model, None) == {}  # of a checkpoint that holds all weights


def test_the_folder_of_the_base_keeps_the_base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", fake_peft())
    save_model_folder(tmp_path, state(100), torch.nn.Linear(1, 1), None, 500)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    before = {name: (tmp_path / name).read_bytes() for name in names(tmp_path)}
    model = FakePeftModel("default")
    model.name_or_path = str(tmp_path)
    with pytest.raises(ValueError, match=r"holds the base of the model, .* by 'count', .* save the model to another"):
        save_model_folder(tmp_path, model.state_dict(), model, None, "5GB")
    assert names(tmp_path) == [*before]
    del model.count
    save_model_folder(tmp_path, model.state_dict(), model, None, "5GB")
    assert {name: (tmp_path / name).read_bytes() for name in before} == before
    assert (tmp_path / "adapter_model.safetensors").exists()
