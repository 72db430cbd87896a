"""Arguments from draccus' parser."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from trainer_kit import TrainingArguments

draccus = pytest.importorskip("draccus")
pytestmark = pytest.mark.ecosystem


@dataclasses.dataclass
class Config:
    trainer: TrainingArguments = dataclasses.field(default_factory=TrainingArguments)
    width: int = 8


def test_a_line_and_its_file(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("trainer:\n  seed: 7\n  learning_rate: 0.001\nwidth: 16\n")
    line = [
        "--config_path",
        str(tmp_path / "run.yaml"),
        "--trainer.learning_rate",
        "3e-4",
        "--trainer.warmup_steps",
        "0.1",
    ]
    config = draccus.parse(Config, args=line)
    assert config == Config(TrainingArguments(learning_rate=3e-4, warmup_ratio=0.1, seed=7), 16)
