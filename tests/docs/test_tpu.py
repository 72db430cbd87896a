"""What docs/en/how-to/tpu.md tells is so: its commands and arguments are taken, its sentences are ours."""

from __future__ import annotations

import ast
import dataclasses
from pathlib import Path
from typing import Any

import pytest
from kit.guides import Guide, dry_run, unsaid

from trainer_kit import XLA, TrainingArguments
from trainer_kit.config import environment

GUIDE = Guide("docs/en/how-to/tpu.md")
OTHERS = ("RuntimeError: ", "mixed_precision=", "strategy=XLA(")  # torch's messages, and what is no message
SENTENCES = [sentence for sentence in GUIDE.sentences if not sentence.startswith(OTHERS)]
NAMES = {field.name for field in dataclasses.fields(TrainingArguments)}


def calls(name: str) -> list[dict[str, Any]]:
    """The keywords of all calls of a class in the guide's Python, with what stands there as their values."""
    nodes = [node for block in GUIDE.python for node in ast.walk(ast.parse(block)) if isinstance(node, ast.Call)]
    return [
        {keyword.arg: ast.literal_eval(keyword.value) for keyword in node.keywords if keyword.arg}
        for node in nodes
        if ast.unparse(node.func) == name
    ]


@pytest.mark.parametrize("command", GUIDE.commands)
def test_the_launcher_takes_the_commands(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PJRT_DEVICE", "CPU")
    monkeypatch.setattr(environment, "has_torch_xla", lambda: True)
    [line] = dry_run(command, tmp_path, monkeypatch, capsys)
    assert "TRAINER_KIT_USE_TPU=1" in line


def test_the_arguments_are_ours() -> None:
    given = calls("TrainingArguments")
    assert len(given) == 2
    assert all(TrainingArguments(**each) for each in given)
    assert [XLA(**each).fsdp for each in calls("XLA")] == [True, True]
    assert {"dataloader_drop_last", "pad_to_lengths", "pad_to_multiple_of", "per_device_eval_batch_size"} < NAMES


@pytest.mark.parametrize("sentence", SENTENCES)
def test_the_sentences_are_said(sentence: str) -> None:
    assert not unsaid(sentence)


def test_there_are_commands_and_sentences() -> None:
    assert (len(GUIDE.commands), len(SENTENCES)) == (6, 11)
