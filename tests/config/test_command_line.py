"""Settings from a command line."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from trainer_kit import TrainingArguments
from trainer_kit.config.command_line import read_command_line


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("--learning_rate 3e-4 --max-steps=10", {"learning_rate": 3e-4, "max_steps": 10}),
        ("--max_steps -1", {"max_steps": -1}),
        ("--output_dir 2024", {"output_dir": "2024"}),
        ("--eval_strategy no --bf16 --tf32 false", {"eval_strategy": "no", "bf16": True, "tf32": False}),
        ("--report_to jsonl html", {"report_to": ["jsonl", "html"]}),
        ("--report_to jsonl", {"report_to": "jsonl"}),
        ('--torch_compile {"mode":"default"}', {"torch_compile": {"mode": "default"}}),
        ("--pad_to_lengths [64,128]", {"pad_to_lengths": [64, 128]}),
        ("", {}),
    ],
)
def test_the_settings_of_a_line(line: str, expected: dict[str, Any]) -> None:
    assert read_command_line(TrainingArguments, line.split()) == ({}, expected)


def test_options_are_given_as_json() -> None:
    args = TrainingArguments.from_args(
        ["--torch_compile", '{"mode": "default"}', "--lr_scheduler_kwargs", '{"power": 2}']
    )
    assert args.torch_compile == {"mode": "default"}
    assert args.lr_scheduler_kwargs == {"power": 2}


def test_a_line_has_precedence_over_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("learning_rate: 1e-3\nseed: 7\neval_strategy: no\n")
    monkeypatch.setattr("sys.argv", ["train.py", "--config", str(path), "--learning_rate", "3e-4", "--max_epochs", "2"])
    args = TrainingArguments.from_args()
    assert args == TrainingArguments(learning_rate=3e-4, seed=7, num_train_epochs=2)


@pytest.mark.parametrize(
    ("file", "line", "expected"),
    [
        ("mixed_precision: no\nnum_train_epochs: 3", "--bf16 --max_epochs 2", {"bf16": True, "num_train_epochs": 2}),
        ("bf16: true\neval_strategy: steps", "--mixed_precision no --evaluation_strategy no", {}),
        ("torch_compile: {mode: default}", "--torch_compile_backend eager", {"torch_compile": ["default", "eager"]}),
        ("torch_compile: {mode: default}", "--torch_compile false", {}),
        ("bf16: true\nfp16: false", "--bf16 false", {}),
    ],
)
def test_a_line_has_precedence_whatever_its_names(
    file: str, line: str, expected: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "run.yaml").write_text(file)
    if isinstance(modes := expected.get("torch_compile"), list):
        expected = {"torch_compile": dict(zip(("mode", "backend"), modes, strict=True))}
    given = ["--config", str(tmp_path / "run.yaml"), *line.split()]
    assert TrainingArguments.from_args(given) == TrainingArguments(**expected)


def test_a_line_has_precedence_over_a_saved_file(tmp_path: Path) -> None:
    TrainingArguments("run", save_steps=7).save(tmp_path / "run.yaml")
    args = TrainingArguments.from_args(["--config", str(tmp_path / "run.yaml"), "--bf16"])
    assert args == TrainingArguments("run", save_steps=7, bf16=True)


def test_settings_of_a_file_that_differ_are_named(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("bf16: true\nmixed_precision: no")
    with pytest.raises(ValueError, match="mixed_precision='no' is not allowed; it gives mixed_precision='no', but"):
        TrainingArguments.from_args(["--config", str(tmp_path / "run.yaml")])


@pytest.mark.parametrize(
    ("line", "error", "message"),
    [
        ("train.txt --seed 1", ValueError, "'train.txt' belongs to no setting; give settings as --name value"),
        ("--seed 1 --seed 2", ValueError, "--seed is given twice; give it once"),
        ("--config a.yaml b.yaml", ValueError, "--config takes one file, but got 2"),
        ("--config", ValueError, "--config takes one file, but got 0"),
        ("--sead 1", TypeError, "TrainingArguments has no field 'sead'; the nearest known name is 'seed'"),
        ("--seed one", TypeError, "seed='one' is not allowed; it must be a whole number from 0 to"),
        ("--lr_scheduler_kwargs [1]", TypeError, "lr_scheduler_kwargs=[1] is not allowed"),
        ("--seed {a", ValueError, "--seed {a is no valid YAML: "),
    ],
)
def test_a_bad_line(line: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error) as raised:
        TrainingArguments.from_args(line.split())
    assert str(raised.value).startswith(message)


def test_help_prints_the_fields(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        TrainingArguments.from_args(["--help"])
    assert raised.value.code == 0
    assert "    learning_rate: Peak learning rate.\n" in capsys.readouterr().out


@dataclasses.dataclass
class _MoreArguments(TrainingArguments):
    model_name: str = "small"
    layers: int = 2


def test_a_subclass_has_its_own_settings() -> None:
    args = _MoreArguments.from_args(["--model_name", "7", "--layers", "3", "--bf16", "--seed", "1"])
    assert (args.model_name, args.layers, args.mixed_precision, args.seed) == ("7", 3, "bf16", 1)
