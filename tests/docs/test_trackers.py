"""The code of docs/en/how-to/trackers.md runs as it stands there."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from kit.tracked_training import DATA, Net, losses

from trainer_kit import Accelerator, Trainer, TrainingArguments
from trainer_kit.trackers import TRACKERS, Tracker

GUIDE = Path(__file__).parents[2] / "docs" / "en" / "how-to" / "trackers.md"
TEXT = GUIDE.read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


@pytest.fixture
def names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Tracker, "is_installed", classmethod(lambda kind: True))
    return {
        "Accelerator": Accelerator, "Trainer": Trainer, "model": Net(), "train_ds": DATA,
        "TrainingArguments": lambda *args, **options: TrainingArguments(
            *args, **options, max_steps=3, logging_steps=1, use_cpu=True, disable_tqdm=True, log_level="warning"
        ),
    }  # fmt: skip


def test_a_tracker_of_one_s_own(names: dict[str, Any], tmp_path: Path) -> None:
    (own,) = (block for block in BLOCKS if "class FileTracker" in block)
    (use,) = (block for block in BLOCKS if "accelerator.log" in block)
    assert len(own.partition("class ")[2].strip().splitlines()) <= 20
    training, _, hand_written = use.partition("\n\n")
    exec(own + training, names)
    lines = [json.loads(line) for line in (tmp_path / "records.jsonl").read_text().splitlines()]
    assert lines[0]["settings"]["max_steps"] == 3
    assert {line["step"]: line["train/loss"] for line in lines if "train/loss" in line} == losses(tmp_path / "run")
    assert lines[-1] == {"status": "finished"}
    (tmp_path / "records.jsonl").unlink()
    exec(own + hand_written, names)
    lines = [json.loads(line) for line in (tmp_path / "records.jsonl").read_text().splitlines()]
    assert lines == [{"step": None, "settings": {"lr": 0.1}}, {"step": 1, "loss": 0.5}, {"status": "finished"}]


def test_options_of_packages(names: dict[str, Any]) -> None:
    (block,) = (block for block in BLOCKS if "entity=" in block)
    exec(block, names)
    wandb, mlflow = names["args"].report_to[-2:]
    assert (wandb.project, wandb.options) == ("my-project", {"entity": "my-team", "tags": ["a"]})
    assert (mlflow.name, mlflow.project) == ("mlflow", None)


def test_the_table_has_every_tracker() -> None:
    named = re.findall(r"^\| `(\w+)` \|", TEXT, re.MULTILINE)
    assert {*named} == {*TRACKERS} - {"tensorboard", "jsonl"}
