"""`TrainingArguments` as a node of draccus' configuration: from a file, the command line, or both."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from trainer_kit import TrainingArguments

draccus = pytest.importorskip("draccus")

pytestmark = pytest.mark.ecosystem

# Its annotation must be the class itself, not its name.
Config: Any = dataclasses.make_dataclass(
    "Config",
    [
        ("train", TrainingArguments, dataclasses.field(default_factory=TrainingArguments)),
        ("width", int, dataclasses.field(default=3)),
    ],
)


def test_a_node_of_a_configuration() -> None:
    config = draccus.parse(Config, args=["--train.learning_rate", "3e-4", "--train.adam_beta1", "0.8", "--width", "4"])
    assert (config.train.learning_rate, config.train.adam_beta1, config.width) == (3e-4, 0.8, 4)


def test_the_command_line_takes_precedence_over_a_file(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(
        "learning_rate: 1e-3\nmax_steps: 7\nreport_to: [tensorboard, jsonl]\neval_strategy: steps\neval_steps: 0.5\n"
    )
    args = draccus.parse(TrainingArguments, config_path=str(path), args=["--learning_rate", "2e-3"])
    assert (args.learning_rate, args.max_steps, args.eval_steps) == (2e-3, 7, 0.5)
    assert args.report_to == ["tensorboard", "jsonl"]
