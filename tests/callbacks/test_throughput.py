from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from trainer_kit.callbacks import Throughput, throughput
from trainer_kit.run import Run


class Clock:
    """Stands still until told to go on."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(throughput, "time", clock)
    return clock


@pytest.fixture
def step(clock: Clock, take_step: Callable[[Run], None]) -> Callable[[Run, Throughput], None]:
    def step(run: Run, callback: Throughput) -> None:
        """2 seconds, a half of one of them waiting for data."""
        clock.now += 2
        run.data_seconds += 0.5
        take_step(run)
        callback.on_step_end(run)

    return step


Step = Callable[[Run, Throughput], None]


def test_rates_since_the_last_record(make_run: Callable[..., Run], clock: Clock, step: Step) -> None:
    run, callback = make_run(), Throughput()
    run.state.step, run.state.samples, run.data_seconds = 5, 50, 7.0  # resumed
    callback.on_train_begin(run)
    step(run, callback)
    step(run, callback)
    expected = {"samples_per_second": 5.0, "steps_per_second": 0.5, "data_wait": 0.25}
    assert callback.metrics(run) == pytest.approx(expected)
    clock.now += 2  # the next step is slower
    step(run, callback)
    run.state.tokens += 400
    assert callback.metrics(run) == pytest.approx(
        {"samples_per_second": 2.5, "steps_per_second": 0.25, "data_wait": 0.125, "tokens_per_second": 100.0}
    )


def test_evaluating_and_saving_do_not_count(make_run: Callable[..., Run], clock: Clock, step: Step) -> None:
    run, callback = make_run(), Throughput()
    callback.on_train_begin(run)
    step(run, callback)
    callback.on_evaluate_begin(run)
    clock.now += 30
    callback.on_evaluate_end(run)
    clock.now += 5
    callback.on_evaluate(run, {})
    clock.now += 20
    run.save_seconds += 20
    step(run, callback)
    clock.now += 10
    run.save_seconds += 10
    step(run, callback)
    assert callback.metrics(run)["steps_per_second"] == pytest.approx(0.5)


@pytest.mark.parametrize("pause", ["evaluation", "save"])
def test_a_wait_for_the_device_at_a_record_counts(
    make_run: Callable[..., Run], clock: Clock, step: Step, pause: str
) -> None:
    """A record reads from the device, and so waits for the steps in work: that is time of training."""
    run, callback = make_run(), Throughput()
    callback.on_train_begin(run)
    step(run, callback)
    clock.now += 6
    assert callback.metrics(run)["steps_per_second"] == pytest.approx(1 / 8)
    clock.now += 1
    if pause == "evaluation":
        callback.on_evaluate_begin(run)
        clock.now += 50
        callback.on_evaluate_end(run)
    else:
        clock.now += 50
        run.save_seconds += 50
    step(run, callback)
    assert callback.metrics(run)["steps_per_second"] == pytest.approx(1 / 3)


def test_going_back_begins_a_new_measure(make_run: Callable[..., Run], clock: Clock, step: Step) -> None:
    run, callback = make_run(), Throughput()
    callback.on_train_begin(run)
    for _ in range(3):
        step(run, callback)
    run.state.step, run.state.samples = 1, 10
    callback.on_rollback(run, Path())
    step(run, callback)
    assert callback.metrics(run)["steps_per_second"] == pytest.approx(0.5)


def test_no_step_no_rates(make_run: Callable[..., Run]) -> None:
    run, callback = make_run(), Throughput()
    assert callback.metrics(run) == {}
    callback.on_train_begin(run)
    assert callback.metrics(run) == {}
