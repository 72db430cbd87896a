"""What a user calls a model becomes the right class and a batch, without memory; what is none is refused."""

from __future__ import annotations

import json
import sys
import textwrap
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch.utils import _pytree as pytree

from trainer_kit.loss.batch import Counts, count
from trainer_kit.loss.loss import found_loss
from trainer_kit.tools.model_resolver import resolve

SMALL = {
    "bert": {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64},
    "gpt2": {"n_embd": 32, "n_layer": 1, "n_head": 2},
    "llama": {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2},
    "t5": {"d_model": 32, "d_ff": 64, "num_layers": 1, "num_heads": 2},
    "bart": {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "vocab_size": 1000},
    "vit": {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64},
    "resnet": {"embedding_size": 8, "hidden_sizes": [8, 8, 8, 8], "depths": [1, 1, 1, 1]},
}

MODULE = """
    import torch
    from torch import nn

    class Scored(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 3)
        def forward(self, x, labels):
            return nn.functional.cross_entropy(self.layer(x), labels)

    def pair():
        return Scored(), {"x": torch.zeros(2, 4), "labels": torch.zeros(2, dtype=torch.int64), "scale": torch.ones(())}

    def triple():
        return nn.Linear(4, 3), (torch.zeros(2, 4), torch.zeros(2, dtype=torch.int64)), lambda model, batch: None

    def reader():  # of values, which a tensor on the device "meta" has not
        model = Scored()
        model.scale = model.layer.weight.abs().sum().item()
        return model, torch.zeros(2, 4)

    def uncallable():
        return Scored(), torch.zeros(2, 4), "mean"

    def empty():
        return Scored(), torch.zeros(0, 4)

    def fails():
        raise RuntimeError("of its own")

    def alone():
        return nn.Linear(1, 1)

    def gpt():
        from transformers import GPT2Config, GPT2LMHeadModel
        return GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=1, n_head=2))

    class Makers:
        @staticmethod
        def pair():
            return pair()

    def wrong():
        return {"model": Scored()}

    def four():
        return Scored(), 1, 2, 3

    def wants(size):
        return Scored()

    number = 3
"""


def config(folder: Path, kind: str, **values: Any) -> str:
    """A file with the config of a small model."""
    file = folder / "config.json"
    file.write_text(json.dumps({"model_type": kind, **SMALL.get(kind, {}), **values}))
    return str(file)


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module in the current folder, which is no place of Python's path yet."""
    name = f"of_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(textwrap.dedent(MODULE))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place])
    return name


@pytest.mark.parametrize(
    ("kind", "values", "expected", "shapes"),
    [
        ("bert", {}, "BertForSequenceClassification", {"labels": [3]}),
        ("bert", {"architectures": ["BertModel"]}, "BertForSequenceClassification", {"labels": [3]}),
        ("bert", {"architectures": ["BertForMaskedLM"]}, "BertForMaskedLM", {"labels": [3, 16]}),
        ("bert", {"architectures": ["BertForTokenClassification"]}, "BertForTokenClassification", {"labels": [3, 16]}),
        ("bert", {"architectures": ["BertForQuestionAnswering"]}, "BertForQuestionAnswering",
         {"start_positions": [3], "end_positions": [3]}),
        ("gpt2", {}, "GPT2LMHeadModel", {"labels": [3, 16]}),
        ("gpt2", {"architectures": ["GPT2ForSequenceClassification"]}, "GPT2ForSequenceClassification",
         {"labels": [3]}),
        ("llama", {}, "LlamaForCausalLM", {"labels": [3, 16]}),
        ("t5", {}, "T5ForConditionalGeneration", {"labels": [3, 16]}),
        ("bart", {}, "BartForConditionalGeneration", {"labels": [3, 16]}),
        ("vit", {"image_size": 32}, "ViTForImageClassification", {"pixel_values": [3, 3, 32, 32], "labels": [3]}),
        ("resnet", {}, "ResNetForImageClassification", {"pixel_values": [3, 3, 224, 224], "labels": [3]}),
    ],
)  # fmt: skip
def test_a_config_gets_its_class_and_a_batch_that_it_takes(
    kind: str, values: dict[str, Any], expected: str, shapes: dict[str, list[int]], tmp_path: Path
) -> None:
    seq_len = None if "pixel_values" in shapes else 16
    subject = resolve(config(tmp_path, kind, **values), batch_size=3, seq_len=seq_len)
    assert type(subject.model).__name__ == expected
    assert expected in subject.origin
    assert all(tensor.is_meta for tensor in [*subject.model.parameters(), *subject.batch.values()])
    assert subject.model.training
    texts = {} if seq_len is None else {"input_ids": [3, 16], "attention_mask": [3, 16]}
    assert {name: [*tensor.shape] for name, tensor in subject.batch.items()} == {**texts, **shapes}

    real = type(subject.model)(subject.model.config)  # the same on real memory takes a batch of these shapes
    ones = {name: torch.ones_like(tensor, device="cpu") for name, tensor in subject.batch.items()}
    loss = found_loss(real(**ones))
    assert loss is not None
    loss.backward()
    assert [*map(list, (p.shape for p in real.parameters()))] == [
        *map(list, (p.shape for p in subject.model.parameters()))
    ]
    assert isinstance(count(ones, 2), Counts)


@pytest.mark.parametrize(
    ("values", "dtype", "shape"),
    [
        ({"num_labels": 1}, torch.float32, [3]),
        ({"num_labels": 5}, torch.int64, [3]),
        ({"num_labels": 5, "problem_type": "multi_label_classification"}, torch.float32, [3, 5]),
    ],
)
def test_the_labels_of_a_problem(values: dict[str, Any], dtype: torch.dtype, shape: list[int], tmp_path: Path) -> None:
    values["id2label"] = {number: str(number) for number in range(values.pop("num_labels"))}
    labels = resolve(config(tmp_path, "bert", **values), batch_size=3).batch["labels"]
    assert (labels.dtype, [*labels.shape]) == (dtype, shape)


def test_lengths_and_dtypes_that_nobody_gave(tmp_path: Path) -> None:
    short = resolve(config(tmp_path, "bert", max_position_embeddings=40, dtype="bfloat16"))
    assert [*short.batch["input_ids"].shape] == [8, 40]
    assert next(short.model.parameters()).dtype is torch.bfloat16
    assert "bfloat16" in short.origin
    long = resolve(config(tmp_path, "llama", max_position_embeddings=10**5), dtype=torch.float16)
    assert [*long.batch["input_ids"].shape] == [8, 512]
    assert next(long.model.parameters()).dtype is torch.float16
    assert torch.get_default_dtype() is torch.float32


def test_seventy_billion_parameters_take_no_memory(tmp_path: Path) -> None:
    resolve(config(tmp_path, "llama"))  # the libraries' own
    path = config(
        tmp_path, "llama", hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64,
        num_key_value_heads=8, vocab_size=128256, architectures=["LlamaForCausalLM"], dtype="bfloat16",
    )  # fmt: skip
    before = psutil.Process().memory_info().rss
    subject = resolve(path)
    assert psutil.Process().memory_info().rss - before < 200 * 2**20
    assert sum(p.numel() for p in subject.model.parameters()) == 70_553_706_496  # as its model card says: 70.6B


def test_a_folder(tmp_path: Path) -> None:
    config(tmp_path, "gpt2")
    assert type(resolve(str(tmp_path)).model).__name__ == "GPT2LMHeadModel"


def test_a_name_in_the_hubs_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = tmp_path / "models--someone--small" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    config(snapshot, "gpt2")
    refs = tmp_path / "models--someone--small" / "refs"
    refs.mkdir()
    (refs / "main").write_text("abc")
    monkeypatch.setattr("transformers.utils.hub.TRANSFORMERS_CACHE", str(tmp_path), raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert resolve("someone/small").origin.startswith("GPT2LMHeadModel from someone/small")


@pytest.mark.parametrize("function", ["pair", "triple", "reader", "Makers.pair"])
def test_a_function(module: str, function: str) -> None:
    subject = resolve(f"{module}:{function}")
    assert isinstance(subject.model, torch.nn.Module)
    assert all(p.is_meta != (function == "reader") for p in subject.model.parameters())
    assert (subject.compute_loss is not None) == (function == "triple")
    shapes = [[*tensor.shape] for tensor in pytree.tree_leaves(subject.batch)]
    assert shapes[0] == [2, 4]
    larger = [[*tensor.shape] for tensor in pytree.tree_leaves(resolve(f"{module}:{function}", batch_size=5).batch)]
    assert larger == [[5, *shape[1:]] if shape else [] for shape in shapes]


def test_a_function_that_gives_a_known_model_alone(module: str) -> None:
    subject = resolve(f"{module}:gpt", batch_size=2, seq_len=6, dtype=torch.bfloat16)
    assert {name: [*tensor.shape] for name, tensor in subject.batch.items()} == {
        "input_ids": [2, 6],
        "attention_mask": [2, 6],
        "labels": [2, 6],
    }
    assert {p.dtype for p in subject.model.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("name", "options", "error", "sentence"),
    [
        ("{module}:wrong", {}, TypeError, "returned dict; it must return a torch.nn.Module, (module, batch) or"),
        ("{module}:four", {}, TypeError, "returned (Scored, int, int, int); it must return"),
        ("{module}:uncallable", {}, TypeError, "returned (Scored, Tensor, str); it must return"),
        ("{module}:empty", {}, ValueError, "the batch that {module}:empty returned has no samples"),
        ("{module}:fails", {}, ValueError, "{module}:fails raised RuntimeError: of its own ("),
        ("{module}:fails", {}, ValueError, "{module}.py, line 30"),
        ("{module}:alone", {}, TypeError, "returned a Linear, whose batch is unknown; return (module, batch)"),
        ("{module}:wants", {}, TypeError, "is called without arguments, but it is missing a required argument: 'size'"),
        ("{module}:number", {}, TypeError, "is of type int; give a function that returns a torch.nn.Module"),
        ("{module}:missing", {}, ValueError, "has no 'missing'"),
        ("{module}:pair", {"seq_len": 4}, ValueError, "--seq-len 4 has no effect: {module}:pair brings a batch"),
        ("nowhere.at.all:pair", {}, ValueError, "there is no module 'nowhere' here or installed"),
        ("{module}.py:pair", {}, ValueError, "write its name with dots and without .py"),
        ("./{module}.py:pair", {}, ValueError, "for a function write MODULE:FUNCTION, with dots and without .py"),
        ("nowhere/config.json", {}, ValueError, "there is no file or folder 'nowhere/config.json'"),
        ("someone/nothing", {}, ValueError, "there is no file, folder or function 'someone/nothing', and no such"),
        ("", {}, ValueError, "there is no file or folder ''"),
    ],
)
def test_what_is_no_model(
    name: str, options: dict[str, Any], error: type[Exception], sentence: str, module: str
) -> None:
    with pytest.raises(error) as raised:
        resolve(name.format(module=module), **options)
    assert sentence.format(module=module) in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (None, "has no config.json, which says what model it is"),
        ("{", "cannot be read as JSON: Expecting property name"),
        (b"\xff\xfe\xff", "cannot be read as JSON: 'utf-8' codec"),
        ("[]", "has no model_type, so that it is no config of a transformers model"),
        ("{}", "has no model_type"),
        ('{"model_type": "bertt"}', "has model_type 'bertt', which the installed transformers does not know"),
        ('{"model_type": "bert", "hidden_size": "wide"}', "config"),
        ('{"model_type": "bert", "hidden_size": 33}', "from the config"),
        ('{"model_type": "llava"}', "no batch can be made for a llava from its config alone; give MODULE:FUNCTION"),
        ('{"model_type": "whisper", "architectures": ["WhisperForConditionalGeneration"]}',
         "no batch can be made for a WhisperForConditionalGeneration"),
    ],
)  # fmt: skip
def test_what_is_no_config(content: str | bytes | None, sentence: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "config.json").write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError) as raised:  # noqa: PT011  # the sentence is looked at below
        resolve(str(tmp_path))
    assert sentence in str(raised.value)
    assert str(tmp_path) in str(raised.value)


@pytest.mark.parametrize(
    ("kind", "length", "sentence"),
    [
        ("bert", 513, "--seq-len 513 is longer than the 512 positions of BertForSequenceClassification"),
        ("vit", 16, "--seq-len 16 has no meaning for ViTForImageClassification, which sees images"),
    ],
)
def test_lengths_that_do_not_suit(kind: str, length: int, sentence: str, tmp_path: Path) -> None:
    path = config(tmp_path, kind)
    with pytest.raises(ValueError, match=sentence):
        resolve(path, seq_len=length)
