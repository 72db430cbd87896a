"""The main process is lost, and another one becomes the main one while it trains."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import tqdm
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from trainer_kit.callback import Callback
from trainer_kit.callbacks import Checkpointing, JsonLines, Progress, PushToHub, TensorBoard, Tracking, read_log
from trainer_kit.run import Run
from trainer_kit.trackers import Tracker


@pytest.fixture
def other(make_run: Callable[..., Run]) -> Run:
    """The run of a process that is not the main one."""
    return make_run(rank=1)


@pytest.fixture
def begin(other: Run) -> Iterator[Callable[[Callback], Callback]]:
    """Lets a callback train up to step 5, where its process becomes the main one."""
    begun = list[Callback]()

    def train(callback: Callback) -> Callback:
        begun.append(callback)
        callback.on_train_begin(other)
        for step in range(1, 6):
            other.state.step = step
            callback.on_step_end(other)
            callback.on_log(other, {"step": step, "loss": 1.0})
        other.strategy.collectives.rank = 0
        callback.on_regroup(other)
        other.state.step = 6
        callback.on_log(other, {"step": 6, "loss": 2.0})
        return callback

    yield train
    for callback in begun:
        callback.on_train_end(other, None)
        callback.on_exit(other)


def test_it_goes_on_with_the_log(
    other: Run, begin: Callable[[Callback], Callback], make_run: Callable[..., Run]
) -> None:
    first = make_run()
    lines = JsonLines()
    lines.on_train_begin(first)
    for first.state.step in range(1, 5):
        lines.on_log(first, {"step": first.state.step, "loss": 1.0})
    lines.on_exit(first)
    begin(JsonLines()).on_regroup(other)
    records = list(read_log(Path(other.args.output_dir) / "log.jsonl"))
    assert [(record["event"], record["step"]) for record in records] == [
        ("start", 0), *(("log", step) for step in range(1, 5)), ("start", 5), ("log", 6),
    ]  # fmt: skip


def test_it_goes_on_with_the_event_files(
    other: Run, begin: Callable[[Callback], Callback], make_run: Callable[..., Run]
) -> None:
    first = make_run()
    board = TensorBoard()
    board.on_train_begin(first)
    for first.state.step in range(1, 8):  # two more than the others have heard of
        board.on_log(first, {"step": first.state.step, "loss": 1.0})
    board.on_exception(first, RuntimeError())
    time.sleep(1.1)  # the names of the files hold the second
    begin(TensorBoard()).on_regroup(other)
    events = EventAccumulator(str(other.args.log_dir)).Reload().Scalars("train/loss")
    assert [(event.step, event.value) for event in events] == [*((step, 1.0) for step in range(1, 6)), (6, 2.0)]


def test_it_shows_a_bar(other: Run, begin: Callable[[Callback], Callback], capsys: pytest.CaptureFixture[str]) -> None:
    begin(Progress()).on_regroup(other)
    assert len(tqdm.tqdm._instances) == 1  # type: ignore[attr-defined]
    assert "5/10" in capsys.readouterr().err


class Recorder(Tracker):
    """Counts its starts."""

    name = "recorder"
    starts = 0

    def start(self) -> None:
        self.starts += 1
        self.run_id = self.run_id or "run-1"


def test_it_begins_no_second_run_at_a_tracker(other: Run, begin: Callable[[Callback], Callback]) -> None:
    tracker = Recorder()
    tracking = begin(Tracking([tracker]))
    assert tracker.starts == 1
    assert tracking.state_dict() == {"runs": {"recorder": "run-1"}}


def test_it_saves_after_the_minutes(make_run: Callable[..., Run]) -> None:
    run = make_run(rank=1, save_strategy="minutes", save_minutes=1e-9)
    callback = Checkpointing()
    callback.on_train_begin(run)
    run.state.step = 1
    callback.on_step_end(run)
    assert not run.requests.save, "the main process requests it"
    run.strategy.collectives.rank = 0
    callback.on_regroup(run)
    callback.on_step_end(run)
    assert run.requests.save


def test_it_knows_the_newest_checkpoint(other: Run) -> None:
    callback = PushToHub("somebody/something")
    callback.on_save(other, Path("checkpoint-5"))
    assert callback._final(other) == Path("checkpoint-5")
