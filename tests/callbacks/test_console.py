from __future__ import annotations

from collections.abc import Callable

import pytest

from trainer_kit.callbacks import Console, console
from trainer_kit.run import Run


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(console, "time", clock)
    return clock


Lines = Callable[[], list[str]]


@pytest.fixture
def lines(capsys: pytest.CaptureFixture[str]) -> Lines:
    def read() -> list[str]:
        captured = capsys.readouterr()
        assert captured.out == ""
        return captured.err.splitlines()

    return read


def log(run: Run, callback: Console) -> None:
    run.state.step += 1
    callback.on_step_end(run)
    callback.on_log(run, {"step": run.state.step, "epoch": 0.5, "loss": 1.0 / run.state.step, "memory_gib": 1.0})


def test_a_thousand_records_do_not_flood(make_run: Callable[..., Run], clock: Clock, lines: Lines) -> None:
    run, callback = make_run(), Console(every=5)
    run.total_steps = 1000
    callback.on_train_begin(run)
    assert lines() == ["step 0/1000  training begins on cpu"]
    for _ in range(1000):
        clock.now += 0.01
        log(run, callback)
    callback.on_train_end(run, None)
    shown = lines()
    assert len(shown) == 3  # at 0.01 s the first, at 5.01 s, and the last
    assert shown[0] == "step 1/1000  epoch 0.5  loss 1  10 s left"
    assert shown[-1] == "step 1000/1000  epoch 0.5  loss 0.001"


def test_evaluations_are_always_shown_after_the_record_before_them(
    make_run: Callable[..., Run], clock: Clock, lines: Lines
) -> None:
    run, callback = make_run(), Console(every=5)
    callback.on_train_begin(run)
    for _ in range(10):
        clock.now += 1
        log(run, callback)
        callback.on_evaluate(run, {"eval_loss": 0.25})
    shown = lines()
    assert shown.count("step 5/10  eval_loss 0.25") == 1
    assert sum("eval_loss" in line for line in shown) == 10
    steps = [(int(line.split()[1].split("/")[0]), " loss" in line) for line in shown[1:]]
    assert steps == [(step, is_record) for step in range(1, 11) for is_record in (True, False)]


def test_a_sign_of_life_where_records_are_rare(make_run: Callable[..., Run], clock: Clock, lines: Lines) -> None:
    run, callback = make_run(), Console(every=5)
    callback.on_train_begin(run)
    lines()
    for _ in range(9):
        clock.now += 4
        run.state.step += 1
        callback.on_step_end(run)
    assert lines() == [f"step {step}/10  epoch 0  {left} left" for step, left in [(3, "28 s"), (6, "16 s"), (9, "4 s")]]


def test_the_figures_of_the_run_come_last_and_whole(make_run: Callable[..., Run], clock: Clock, lines: Lines) -> None:
    run, callback = make_run(), Console(every=5)
    callback.on_train_begin(run)
    log(run, callback)
    log(run, callback)
    callback.on_train_end(run, {"train_loss": 0.5, "train_runtime": 1.5})
    assert [line.split("  ", 1)[1].split("  ")[0:2] for line in lines()[1:]] == [
        ["epoch 0.5", "loss 1"],
        ["epoch 0.5", "loss 0.5"],
        ["train_loss 0.5", "train_runtime 1.5"],
    ]


def test_an_error_is_told_once(make_run: Callable[..., Run], clock: Clock, lines: Lines) -> None:
    run, callback = make_run(), Console(every=5)
    callback.on_exception(run, ValueError("before training"))
    assert lines() == []
    callback.on_train_begin(run)
    log(run, callback)
    log(run, callback)
    clock.now += 61
    callback.on_exception(run, ValueError("x"))
    callback.on_exception(run, ValueError("x"))
    assert lines()[-2:] == [
        "step 2/10  epoch 0.5  loss 0.5",
        "step 2/10  training ends by ValueError after 1 min 1 s",
    ]


def test_every_record_with_0(make_run: Callable[..., Run], clock: Clock, lines: Lines) -> None:
    run, callback = make_run(), Console(every=0)
    callback.on_train_begin(run)
    for _ in range(7):
        log(run, callback)
    assert len(lines()) == 8


def test_other_processes_are_silent(make_run: Callable[..., Run], lines: Lines) -> None:
    run, callback = make_run(rank=1), Console(every=0)
    callback.on_train_begin(run)
    log(run, callback)
    callback.on_evaluate(run, {"eval_loss": 1.0})
    callback.on_train_end(run, None)
    assert lines() == []


def test_no_stderr(make_run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr", None)
    Console().on_train_begin(make_run())


@pytest.mark.parametrize("every", [-1, float("nan")])
def test_a_negative_time_is_refused(every: float) -> None:
    with pytest.raises(ValueError, match="every"):
        Console(every)
