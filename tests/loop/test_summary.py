"""What a training returns in the end."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from trainer_kit import SingleDevice
from trainer_kit.callback import CallbackList
from trainer_kit.loop import summary
from trainer_kit.loop.summary import Beginning, summarize
from trainer_kit.profiling.time_ledger import Ledger
from trainer_kit.state import TrainState


def test_rates_are_those_of_this_start(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [10.0]
    monkeypatch.setattr(summary.time, "perf_counter", lambda: now[0])
    state = TrainState(step=4, samples=40, loss_sum=6.0, loss_steps=4)
    run: Any = SimpleNamespace(state=state, strategy=SingleDevice("cpu"), ledger=Ledger())
    begin = Beginning(run)
    now[0], state.step, state.samples = 14.0, 10, 100
    state.loss_sum, state.loss_steps = 15.0, 10
    assert begin.seconds() == 4
    output = summarize(run, CallbackList([]), begin, 3.0)
    assert (output.global_step, output.training_loss) == (10, 1.5)
    assert output.metrics["train_samples_per_second"] == 20
    assert output.metrics["train_steps_per_second"] == 2
    assert output.metrics["train_runtime"] == 3
