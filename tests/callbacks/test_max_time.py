"""Training ends after a time."""

from __future__ import annotations

import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kit.models import Linear
from kit.trainer import arguments

from trainer_kit import Trainer
from trainer_kit.callback import Callback
from trainer_kit.callbacks import MaxTime
from trainer_kit.run import Run
from trainer_kit.state import Requests


class Clock(Callback):
    """Advances a simulated clock by ten seconds a step."""

    priority = -50

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr("trainer_kit.callbacks.max_time.time.monotonic", lambda: self.now)

    def on_step_end(self, run: Run) -> None:
        self.now += 10.0


def test_training_ends_after_the_time_and_a_resume_counts_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = [{"x": torch.ones(4), "labels": torch.tensor(1)}] * 8

    def train(limit: datetime.timedelta | float, resume: bool) -> int:
        args = arguments(tmp_path, max_steps=20, per_device_train_batch_size=1, save_strategy="steps")
        callbacks = [Clock(monkeypatch), MaxTime(limit)]
        return Trainer(Linear(), args, dataset, callbacks=callbacks).train(resume_from_checkpoint=resume).global_step

    assert train(0.5, resume=False) == 3
    assert train(datetime.timedelta(seconds=50), resume=True) == 5
    assert train(0.5, resume=True) == 5


def test_time_goes_on_in_a_training_that_takes_another_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a rollback, or in a process that joins others, no training begins."""
    clock, limit = Clock(monkeypatch), MaxTime(1.0)
    run: Any = SimpleNamespace(requests=Requests())
    limit.on_train_begin(run)
    clock.now += 50
    limit.load_state_dict({"elapsed": 30.0})
    assert limit.elapsed == 30
    clock.now += 40
    limit.on_step_end(run)
    assert limit.elapsed == 70
    assert run.requests.stop


@pytest.mark.parametrize("limit", [0, -1.0, datetime.timedelta(0), float("inf")])
def test_a_limit_must_be_above_zero(limit: float | datetime.timedelta) -> None:
    with pytest.raises(ValueError, match="must be a time above 0: a timedelta, or minutes"):
        MaxTime(limit)


@pytest.mark.parametrize("limit", ["00:12:00:00", {"hours": 12}, None])
def test_what_is_no_time(limit: Any) -> None:
    with pytest.raises(TypeError, match=r"give a datetime.timedelta, such as timedelta\(hours=12\), or minutes"):
        MaxTime(limit)
