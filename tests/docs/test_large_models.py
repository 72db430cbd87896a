"""The page on large models tells the truth: its commands and options are taken, its examples train on two processes."""

from __future__ import annotations

import ast
import inspect
import json
import re
from pathlib import Path

import pytest
import torch
from kit.architectures import llama
from kit.guides import Guide, dry_run, unsaid
from kit.ranks import on_ranks

from trainer_kit import FSDP, Trainer, TrainingArguments
from trainer_kit.callbacks import PeerCopies
from trainer_kit.cli.main import main

GUIDE = Guide("docs/en/how-to/large-models.md")
SENTENCES = re.findall(r"^\| `(.*?)` \|", GUIDE.text.partition("\n| message |")[2], re.MULTILINE)
LLAMA_8B = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
    "max_position_embeddings": 8192, "dtype": "float32",
}  # fmt: skip


@pytest.mark.parametrize("command", GUIDE.commands)
def test_the_launcher_takes_the_commands(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    processes = int(command.split()[3])
    lines = dry_run(command.replace("launch", "launch --cpu"), tmp_path, monkeypatch, capsys)
    assert len(lines) == processes
    assert all("TRAINER_KIT_FSDP=1" in line for line in lines)


def test_the_options_are_ours() -> None:
    table = GUIDE.text.partition("## Options")[2].partition("\n## ")[0]
    told = dict(re.findall(r"^\| `(\w+)` \| `(\S+)` \|", table, re.MULTILINE))
    ours = {name: repr(each.default) for name, each in inspect.signature(FSDP).parameters.items()}
    assert told == ours


def test_the_examples_are_calls_of_ours() -> None:
    nodes = [node for block in GUIDE.python for node in ast.walk(ast.parse(block)) if isinstance(node, ast.Call)]
    for ours, count in ((FSDP, 4), (Trainer, 3), (TrainingArguments, 1), (PeerCopies, 1)):
        calls = [node for node in nodes if ast.unparse(node.func) == ours.__name__]
        assert len(calls) == count
        assert {each.arg for node in calls for each in node.keywords} <= {*inspect.signature(ours).parameters}


@pytest.mark.parametrize("sentence", SENTENCES)
def test_the_sentences_are_said(sentence: str) -> None:
    assert not unsaid(sentence)


def test_there_are_commands_and_sentences() -> None:
    assert (len(GUIDE.commands), len(SENTENCES)) == (3, 15)


@pytest.mark.slow
def test_the_estimate_is_what_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("llama-8b.json").write_text(json.dumps(LLAMA_8B))
    command = next(line for block in GUIDE.shell for line in block.splitlines() if " estimate " in line)
    main(command.split()[1:])
    shown = capsys.readouterr().out
    row = next(line for line in GUIDE.text.splitlines() if line.startswith("| 8 |"))
    weights, optimizer, gathered, _, peak = (cell.strip() for cell in row.split("|")[2:-1])
    for name, size in {"weights": weights, "optimizer": optimizer, "gathered": gathered, "peak": peak}.items():
        assert re.search(rf"^{name} +{re.escape(size)} ", shown, re.MULTILINE), (name, size)


def train(folder: str, weights: str) -> dict[str, torch.Tensor]:
    samples = [{"input_ids": torch.arange(5), "labels": torch.arange(5)}] * 8
    args = TrainingArguments(
        f"{folder}/run", max_steps=2, use_cpu=True, save_strategy="no", report_to="none", disable_tqdm=True,
        learning_rate=0.0,
    )  # fmt: skip
    strategy = FSDP(device="cpu")
    trainer = Trainer(args=args, train_dataset=samples, model_init=llama, weights=weights, strategy=strategy)
    assert all(each.is_meta for each in trainer.run.model.parameters())
    trainer.train()
    trainer.save_model(f"{folder}/model")
    return {name: each.full_tensor() for name, each in trainer.run.model.state_dict().items()}


@pytest.mark.distributed
def test_a_model_begins_with_weights_and_ends_in_a_folder(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(5)
    saved = llama()
    saved.save_pretrained(tmp_path / "weights")
    expected = saved.state_dict()
    loaded = on_ranks(2, train, str(tmp_path), str(tmp_path / "weights"))
    for state in (*loaded, AutoModelForCausalLM.from_pretrained(tmp_path / "model").state_dict()):
        assert state.keys() == expected.keys()
        assert all(torch.equal(state[name], value) for name, value in expected.items())
