"""`trainer-kit estimate`: from a config to a table, a verdict and ways to save, in a terminal and as JSON."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest
import torch

from trainer_kit import TrainingArguments
from trainer_kit.cli.main import main
from trainer_kit.memory import Anatomy, Component
from trainer_kit.memory.advice import Estimate, Option
from trainer_kit.memory.anatomy import KINDS
from trainer_kit.utils.units import format_size

LAYER = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
BERT = {"model_type": "bert", "vocab_size": 1000, "max_position_embeddings": 64, **LAYER}


class Asked(NamedTuple):
    """What the command asked `advise` for."""

    model: torch.nn.Module
    args: TrainingArguments
    batch: Any
    others: dict[str, Any]


ANATOMY = Anatomy(
    components=(
        Component("weights", 3 * 2**30, f"counted on fake tensors: {KINDS['weights']}"),
        Component("activations", 2**30, f"counted on fake tensors: {KINDS['activations']}"),
        Component("runtime", 2**29, "assumed: a context (its guide)"),
    ),
    peak=9 * 2**29,
    device="cuda",
    parameters=3 * 2**28,
    trainable=3 * 2**28,
    batch_size=8,
)


@pytest.fixture
def config(tmp_path: Path) -> str:
    """The config of a small BERT."""
    file = tmp_path / "config.json"
    file.write_text(json.dumps(BERT))
    return str(file)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Asked]:
    """What is asked for; the answer is always the same."""
    found: list[Asked] = []

    def answer(model: Any, args: Any, batch: Any, **others: Any) -> Estimate:
        found.append(Asked(model, args, batch, others))
        return Estimate(ANATOMY, 2**32, 6, (Option("optim='sgd'", {"optim": "sgd"}, 2**30, True),))

    monkeypatch.setattr("trainer_kit.memory.advice.advise", answer)
    return found


def told(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["estimate", *words]) == 0
    return capsys.readouterr().out


@pytest.mark.slow
def test_a_step_is_estimated(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    from transformers import AutoModelForSequenceClassification, BertConfig

    shown = told(capsys, config, "--batch-size", "64", "--device-memory", "700MiB")
    assert shown.startswith(f"BertForSequenceClassification from {config}, weights in float32\n")
    model = AutoModelForSequenceClassification.from_config(BertConfig.from_json_file(config))
    # The allocator gives out multiples of 512 bytes.
    weights = sum(-(-p.numel() * 4 // 512) * 512 for p in model.parameters())
    assert re.search(rf"^weights +{re.escape(format_size(weights))} ", shown, re.MULTILINE)
    for name in ("gradients", "optimizer", "activations", "runtime", "peak"):
        assert re.search(rf"^{name} +[\d.]+ .iB ", shown, re.MULTILINE)
    assert re.search(
        r"^[\d.]+ MiB fits into 700 MiB; the largest micro-batch that fits is \d+ samples", shown, re.MULTILINE
    )
    for way in ("mixed_precision='bf16'", "optim='adamw_8bit'"):
        assert way in shown
    assert "per_device_train_batch_size=32, gradient_accumulation_steps=2" in shown


def test_the_table_has_its_sources(config: str, asked: list[Asked], capsys: pytest.CaptureFixture[str]) -> None:
    shown = told(capsys, config).splitlines()
    assert "4.5 GiB does not fit into 4 GiB; the largest micro-batch that fits is 6 samples" in shown
    assert shown[-3:] == [
        "how this was found",
        "weights, activations: counted on fake tensors",
        "runtime: assumed: a context (its guide)",
    ]


def test_copies_in_memory(config: str, asked: list[Asked], capsys: pytest.CaptureFixture[str]) -> None:
    """The model's 3 GiB of weights are divided over 4 processes, and lie in memory four times."""
    assert "host memory of PeerCopies: 3 GiB a process" in told(capsys, config, "--peer-copies", "--num-processes", "4")
    assert json.loads(told(capsys, config, "--peer-copies", "--json"))["peer_copies"] == 12 * 2**30
    assert "PeerCopies" not in told(capsys, config)
    sharded = dataclasses.replace(ANATOMY, shards=8)
    assert sharded.peer_copies(1) == sharded.peer_copies(8) == 12 * 2**30
    assert sharded.peer_copies(16) == 6 * 2**30


def test_json(config: str, asked: list[Asked], capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(told(capsys, config, "--json"))
    assert found["model"] == config
    assert found["origin"] == f"BertForSequenceClassification from {config}, weights in float32"
    assert found["anatomy"]["peak"] == sum(each["nbytes"] for each in found["anatomy"]["components"]) == 9 * 2**29
    assert (found["fits"], found["device_memory"], found["largest_batch_size"]) == (False, 2**32, 6)
    assert found["options"] == [{"name": "optim='sgd'", "changes": {"optim": "sgd"}, "peak": 2**30, "fits": True}]


def test_what_nobody_says_is_as_in_training(config: str, asked: list[Asked]) -> None:
    assert main(["estimate", config]) == 0
    [(model, args, batch, others)] = asked
    assert args == TrainingArguments()
    assert [*batch["input_ids"].shape] == [8, 64]
    assert next(model.parameters()).dtype is torch.float32
    assert others == {"device_memory": None, "compute_loss": None, "device": "cuda", "world_size": 1, "fsdp": 1}


@pytest.mark.parametrize("dash", ["-", "_"])
def test_the_options_are_those_of_the_training(config: str, asked: list[Asked], dash: str) -> None:
    words = (
        "--batch-size 3 --seq-len 16 --optim sgd --mixed-precision bf16 --gradient-checkpointing --dtype bfloat16 "
        "--gradient-accumulation-steps 4 --num-processes 2 --fsdp 2 --device cpu --device-memory 24GiB "
        "--chunked-cross-entropy"
    )
    assert main(["estimate", config, *re.sub(r"(?<=\w)-", dash, words).split()]) == 0
    [(model, args, batch, others)] = asked
    assert args == TrainingArguments(
        per_device_train_batch_size=3,
        optim="sgd",
        mixed_precision="bf16",
        gradient_checkpointing=True,
        chunked_cross_entropy=True,
        gradient_accumulation_steps=4,
    )
    assert [*batch["input_ids"].shape] == [3, 16]
    assert next(model.parameters()).dtype is torch.bfloat16
    assert others == {"device_memory": 24 * 2**30, "compute_loss": None, "device": "cpu", "world_size": 2, "fsdp": 2}


def test_a_function_brings_its_batch_and_loss(
    asked: list[Asked], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "task_of_mine.py").write_text(
        "import torch\n"
        "def make():\n"
        "    return torch.nn.Linear(4, 1), (torch.zeros(64, 4),), lambda model, batch: model(*batch).mean()\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert main(["estimate", "task_of_mine:make"]) == 0
    assert main(["estimate", "task_of_mine:make", "--batch-size", "16"]) == 0
    assert [each.args.per_device_train_batch_size for each in asked] == [64, 16]
    assert [[*each.batch[0].shape] for each in asked] == [[64, 4], [16, 4]]
    assert callable(asked[0].others["compute_loss"])


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU here tells its memory")
def test_without_a_device_there_is_no_verdict(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    shown = told(capsys, config, "--batch-size", "1")
    assert re.search(r"^needs [\d.]+ MiB; whether it fits is not known", shown, re.MULTILINE)
    assert "largest" not in shown
    assert "fits\n" not in shown


@pytest.mark.slow
def test_wide_layers_take_no_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Those of a model with 70 billion parameters."""
    wide = {"hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64, "num_key_value_heads": 8}
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": "llama", "vocab_size": 128256, "num_hidden_layers": 1, **wide}))
    told(capsys, str(file), "--seq-len", "8", "--batch-size", "1")  # what the libraries take
    before = psutil.Process().memory_info().rss
    found = json.loads(told(capsys, str(file), "--batch-size", "1", "--json"))
    assert psutil.Process().memory_info().rss - before < 200 * 2**20
    assert found["anatomy"]["peak"] > 16 * found["anatomy"]["parameters"] > 40 * 10**9


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["{folder}/none.json"], "there is no file or folder '{folder}/none.json'"),
        (["{folder}/config.json", "--optim", "adam"], "optim='adam' is not allowed"),
        (["{folder}/config.json", "--fsdp", "3", "--num-processes", "4"], "fsdp=3 must divide the number of processes"),
        (["{folder}/config.json", "--fsdp", "2", "--mixed-precision", "fp16"], "'fp16' is not possible with fsdp"),
        (["{folder}/config.json", "--batch-size", "0"], "per_device_train_batch_size=0"),
        (["{folder}/config.json", "--seq-len", "65"], "--seq-len 65 is longer than the 64 positions of Bert"),
    ],
)
def test_an_error_is_a_sentence(
    words: list[str], sentence: str, config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["estimate", *(word.format(folder=tmp_path) for word in words)]) == 1
    error = capsys.readouterr().err
    assert error.startswith("trainer-kit estimate: ")
    assert sentence.format(folder=tmp_path) in error
    assert error.count("\n") == 1


def test_an_error_of_the_model_says_where_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "narrow_task.py").write_text(
        "import torch\n"
        "def loss(model, batch):\n"
        "    return model(*batch).mean()\n"
        "def make():\n"
        "    return torch.nn.Linear(4, 1), (torch.zeros(64, 5),), loss\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert main(["estimate", "narrow_task:make"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("trainer-kit estimate: the memory of a step cannot be estimated: RuntimeError: ")
    assert error.endswith("narrow_task.py, line 3)\n")
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], "MODEL"),
        (["m", "--device-memory", "24"], "'24' is no size; give one such as 24GiB or 80GB"),
        (["m", "--fsdp", "0"], "'0' is no whole number of at least 1"),
        (["m", "--num-processes", "0"], "'0' is no whole number of at least 1"),
        (["m", "--seq-len", "-1"], "no whole number"),
        (["m", "--device", "tpu"], "invalid choice: 'tpu'"),
    ],
)
def test_a_command_line_that_makes_no_sense(
    words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["estimate", *words])
    assert sentence in capsys.readouterr().err


def test_a_sharded_model_is_estimated(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    shown = told(capsys, config, "--fsdp", "4", "--batch-size", "2")
    assert re.search(r"^gathered +[\d.]+ KiB .* the root unit and three more units", shown, re.MULTILINE)
    assert "of a step with micro-batches of 2 on cuda, sharded over 4 processes" in shown
    found = json.loads(told(capsys, config, "--fsdp", "4", "--inference", "--json"))["anatomy"]
    assert found["shards"] == 4
    assert "gathered" in [each["name"] for each in found["components"]]


def test_inference_is_estimated(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    shown = told(capsys, config, "--inference", "--batch-size", "2", "--device-memory", "700MiB")
    assert "of a forward pass with batches of 2 on cuda" in shown
    assert re.search(r"^[\d.]+ MiB fits into 700 MiB$", shown, re.MULTILINE)
    assert not re.search(r"^(gradients|optimizer|activations) ", shown, re.MULTILINE)
    found = json.loads(told(capsys, config, "--inference", "--json"))["anatomy"]
    assert found["inference"]
    assert found["peak"] == sum(each["nbytes"] for each in found["components"])
