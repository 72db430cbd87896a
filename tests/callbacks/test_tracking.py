from __future__ import annotations

import math
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.ranks import try_on_ranks
from kit.tracked_training import DATA, Net, losses, make_trainer

from trainer_kit import Trainer
from trainer_kit.callback import Callback
from trainer_kit.callbacks import Tracking
from trainer_kit.errors import CallbackError, NonFiniteError
from trainer_kit.run import Run
from trainer_kit.trackers import Tracker, TrackioTracker


class Recorder(Tracker):
    """Keeps what it is given."""

    name = "recorder"

    def __init__(self, project: str | None = None, failing: str = "") -> None:
        super().__init__(project)
        self.failing = failing
        self.calls: list[tuple[Any, ...]] = []
        self.runs = 0

    def start(self) -> None:
        self._fail("start")
        if self.run_id is None:
            self.runs += 1
            self.run_id = f"run-{self.runs}"
        self.calls.append(("start", self.run_id, self.project, self.run_name))

    def store_init_configuration(self, values: Any) -> None:
        self._fail("store")
        self.calls.append(("store", values))

    def log(self, values: Any, step: int | None = None, **kwargs: Any) -> None:
        self._fail("log")
        self.calls.append(("log", step, values))

    def upload(self, path: Path, name: str, kind: str) -> None:
        assert path.exists()
        self.calls.append(("upload", path.name, name, kind))

    def finish(self) -> None:
        self._fail("finish")
        self.calls.append(("finish", self.status))

    def _fail(self, method: str) -> None:
        if method == self.failing:
            raise ConnectionError("no server")

    def of(self, kind: str) -> list[tuple[Any, ...]]:
        return [call[1:] for call in self.calls if call[0] == kind]

    def history(self, tag: str) -> list[tuple[int, float]]:
        return [(step, values[tag]) for step, values in self.of("log") if tag in values]


def test_a_training_is_tracked(tmp_path: Path) -> None:
    tracker = Recorder()
    trainer = make_trainer(tmp_path, ["jsonl", tracker])
    output = trainer.train()
    assert [call[0] for call in tracker.calls[:2]] == ["start", "store"]
    assert tracker.of("start") == [("run-1", "my-project", "my run")]
    ((settings,),) = tracker.of("store")
    assert settings == trainer.args.to_dict()
    assert settings["report_to"] == ["jsonl"]
    assert tracker.history("train/loss") == list(losses(tmp_path).items())
    assert [step for step, _ in tracker.history("eval/loss")] == [3, 6]
    assert tracker.history("train/train_loss") == [(6, output.training_loss)]
    assert tracker.history("run/goodput") == [(6, output.metrics["goodput"])]
    assert tracker.calls[-1] == ("finish", "finished")


def test_names_are_those_of_the_folder_unless_given(tmp_path: Path) -> None:
    first, second = Recorder(), Recorder("mine")
    second.name, second.run_name = "second", "given"  # type: ignore[misc]
    make_trainer(tmp_path / "the-run", [first, second], run_name=None, project=None).train()
    assert first.of("start") == [("run-1", None, "the-run")]
    assert second.of("start") == [("run-1", "mine", "given")]


def test_a_second_training_is_another_run_and_evaluations_belong_to_the_latest(tmp_path: Path) -> None:
    tracker = Recorder()
    trainer = make_trainer(tmp_path, [tracker], eval_strategy="no", save_strategy="no")
    trainer.evaluate()
    trainer.train()
    trainer.predict(DATA[:4])
    trainer.train()
    assert [run_id for run_id, *_ in tracker.of("start")] == ["run-1", "run-1", "run-1", "run-2"]
    assert len(tracker.of("store")) == 3  # not before the prediction
    assert [step for step, _ in tracker.history("eval/loss")] == [0]
    assert [step for step, _ in tracker.history("test/loss")] == [6]
    assert tracker.of("finish") == [("finished",)] * 4


def test_a_resume_continues_the_run(tmp_path: Path) -> None:
    tracker, again = Recorder(), Recorder()
    make_trainer(tmp_path, [tracker], max_steps=4).train()
    make_trainer(tmp_path, [again]).train(resume_from_checkpoint=True)
    assert tracker.of("start") == again.of("start")
    assert [step for step, _ in again.history("train/loss")] == [5, 6]


class Breaks(Callback):
    def on_step_end(self, run: Run) -> None:
        if run.state.step == 3:
            raise KeyError("mine")


def test_a_failed_training_is_marked(tmp_path: Path) -> None:
    tracker = Recorder()
    trainer = make_trainer(tmp_path, [tracker])
    broken = Trainer(Net(), trainer.args, DATA, DATA[:6], callbacks=[Breaks()])
    with pytest.raises(CallbackError):
        broken.train()
    assert tracker.calls[-1] == ("finish", "failed")
    with pytest.raises(CallbackError):
        broken.train()  # another run
    assert [run_id for run_id, *_ in tracker.of("start")] == ["run-1", "run-2"]


class Interrupts(Callback):
    def on_step_end(self, run: Run) -> None:
        if run.state.step == 3:
            signal.raise_signal(signal.SIGTERM)


def test_an_interrupted_training_is_marked(tmp_path: Path) -> None:
    tracker = Recorder()
    args = make_trainer(tmp_path, ["jsonl", tracker], report_artifacts=["last"]).args
    with pytest.raises(SystemExit):
        Trainer(Net(), args, DATA, DATA[:6], callbacks=[Interrupts()]).train()
    assert tracker.calls[-2:] == [
        ("upload", "checkpoint-3", "last-checkpoint", "model"),
        ("finish", "interrupted"),
    ]


@pytest.mark.slow
def test_artifacts(tmp_path: Path) -> None:
    tracker = Recorder()
    make_trainer(
        tmp_path, ["jsonl", "html", tracker], report_artifacts=["last", "best", "report"], eval_steps=2,
        metric_for_best_model="loss", learning_rate=0.0,
    ).train()  # fmt: skip
    assert tracker.of("upload") == [
        ("report.html", "report", "report"),
        ("checkpoint-2", "best-checkpoint", "model"),
        ("checkpoint-6", "last-checkpoint", "model"),
    ]
    assert tracker.calls[-1] == ("finish", "finished")


def test_a_missing_artifact_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tracker = Recorder()
    make_trainer(tmp_path, [tracker], report_artifacts=["last"], save_strategy="minutes", save_minutes=60).train()
    missing = [message for message in caplog.messages if "report_artifacts" in message]
    saved = (tmp_path / "checkpoint-6").exists()
    assert bool(tracker.of("upload")) == saved
    assert missing == ([] if saved else ["report_artifacts has 'last-checkpoint', but the run has written none"])


@pytest.mark.parametrize("failing", ["store", "log", "finish"])
def test_what_a_tracker_cannot_store_ends_no_training(
    failing: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tracker, other = Recorder(failing=failing), Recorder()
    other.name = "other"  # type: ignore[misc]
    make_trainer(tmp_path, [tracker, other]).train()
    assert [message for message in caplog.messages if "tracker" in message] == [
        "the tracker 'recorder' could not store a record: no server; training continues"
    ]
    assert len(other.history("train/loss")) == 6
    assert other.calls[-1] == ("finish", "finished")


def test_a_tracker_that_cannot_begin_ends_the_training_before_its_first_step(tmp_path: Path) -> None:
    first, second = Recorder(), Recorder(failing="start")
    second.name = "second"  # type: ignore[misc]
    trainer = make_trainer(tmp_path, [first, second])
    with pytest.raises(CallbackError, match="callback Tracking raised in on_train_begin: ConnectionError: no server"):
        trainer.train()
    assert trainer.run.state.step == 0
    assert first.calls[-1] == ("finish", "failed")


class Plain:
    """A tracker as of accelerate, which is no Tracker."""

    name = "plain"
    requires_logging_directory = False

    def __init__(self) -> None:
        self.records: list[Any] = []

    def log(self, values: Any, step: int | None = None, **kwargs: Any) -> None:
        self.records.append((step, values["train/loss"]) if "train/loss" in values else None)


def test_an_object_with_log_is_enough(tmp_path: Path) -> None:
    tracker = Plain()
    make_trainer(tmp_path, ["jsonl", tracker]).train()
    assert [each for each in tracker.records if each] == list(losses(tmp_path).items())


def test_two_trackers_of_one_name_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="report_to holds two trackers named 'recorder'; give one of them another"):
        Tracking([Recorder(), Recorder()])


def test_a_tracker_whose_package_is_missing_is_refused_early(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TrackioTracker, "package", "no_such_package")
    with pytest.raises(ImportError, match="the tracker 'trackio' needs a package that is not installed"):
        make_trainer(tmp_path, ["trackio"])


def test_a_rollback_keeps_the_run(tmp_path: Path) -> None:
    class Poisoned(Net):
        calls = 0

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            Poisoned.calls += 1
            loss, logits = super().forward(x, labels)
            return loss * (math.nan if Poisoned.calls == 5 else 1.0), logits

    tracker = Recorder()
    args = make_trainer(tmp_path, [tracker], nonfinite="rollback", eval_strategy="no").args
    trainer = Trainer(Poisoned(), args, DATA)
    trainer.train()
    assert len(tracker.of("start")) == 1
    Poisoned.calls = 4
    args.nonfinite = "stop"
    with pytest.raises(NonFiniteError):
        trainer.train()
    assert [run_id for run_id, *_ in tracker.of("start")] == ["run-1", "run-2"]


def on_two_ranks(folder: str, failing: str) -> tuple[list[Any], list[Any]]:
    tracker = Recorder(failing=failing)
    trainer = make_trainer(folder, [tracker], per_device_train_batch_size=2)
    trainer.train()
    trainer.evaluate()
    return tracker.of("start"), tracker.history("train/loss")


@pytest.mark.distributed
def test_only_the_main_process_tracks(tmp_path: Path) -> None:
    main, other = try_on_ranks(2, on_two_ranks, str(tmp_path / "run"), "")
    assert [run_id for run_id, *_ in main[0]] == ["run-1", "run-1"]
    assert len(main[1]) == 6
    assert other == ([], [])


@pytest.mark.distributed
def test_a_tracker_that_cannot_begin_ends_all_processes(tmp_path: Path) -> None:
    for failed in try_on_ranks(2, on_two_ranks, str(tmp_path / "run"), "start"):
        assert "no server" in str(failed)
