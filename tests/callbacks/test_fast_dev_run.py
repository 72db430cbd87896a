"""A run of a few real steps, before a long one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from kit.datasets import points
from kit.models import Linear
from kit.trainer import arguments

from trainer_kit import Trainer
from trainer_kit.callback import Callback
from trainer_kit.callbacks import FastDevRun
from trainer_kit.errors import CallbackError
from trainer_kit.run import Run


class Events(Callback):
    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_evaluate(self, run: Run, metrics: dict[str, float]) -> None:
        self.seen.append("evaluate")

    def on_save(self, run: Run, directory: Path) -> None:
        self.seen.append((directory.parent.name, directory.is_dir()))


def test_each_part_of_the_run_is_tried_once(tmp_path: Path) -> None:
    events = Events()
    args = arguments(tmp_path, max_steps=50, learning_rate=0.1, warmup_steps=10, report_to="jsonl")
    trainer = Trainer(Linear(), args, points(64), points(8), callbacks=[events, FastDevRun(2)])
    trainer.train()
    assert trainer.run.state.step == 2
    assert trainer.run.total_steps == 50
    assert trainer.run.optimizer is not None
    assert trainer.run.optimizer.param_groups[0]["lr"] == pytest.approx(0.02)  # the schedule is that of the long run
    assert events.seen == ["evaluate", ("fast-dev-run", True)]
    assert [*(tmp_path / "run").iterdir()] == []


def test_the_long_training_keeps_its_folder(tmp_path: Path) -> None:
    args = arguments(tmp_path, max_steps=4, save_strategy="steps", save_steps=4)
    for _ in range(2):
        quick = Trainer(Linear(), args, points(8), callbacks=[FastDevRun()])
        assert args.output_dir == str(tmp_path / "run")
        quick.train(resume_from_checkpoint=True)
        assert quick.run.state.step == 1
        Trainer(Linear(), args, points(8)).train(resume_from_checkpoint=True)
        assert [each.name for each in (tmp_path / "run").glob("*-*")] == ["checkpoint-4"]


def test_an_error_keeps_the_folder(tmp_path: Path) -> None:
    class Failing(Callback):
        def on_save(self, run: Run, directory: Path) -> None:
            raise OSError("full")

    trainer = Trainer(Linear(), arguments(tmp_path), points(8), callbacks=[Failing(), FastDevRun()])
    with pytest.raises(CallbackError, match="full"):
        trainer.train()
    assert (tmp_path / "run" / "fast-dev-run").is_dir()


def test_no_step_is_no_run() -> None:
    with pytest.raises(ValueError, match=r"FastDevRun\(0\) must take at least 1 step"):
        FastDevRun(0)
