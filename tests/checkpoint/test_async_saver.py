"""Checkpoints are written beside training, and one that cannot be written is no reason to stop."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import signal
import sys
import threading
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.ranks import on_ranks
from kit.saves import SaveFirst, Watch, names
from scenarios.task import digest, make_trainer

from trainer_kit import DDP, Callback, Run, SaveError
from trainer_kit.callbacks import read_log
from trainer_kit.checkpoint import async_saver, contribution, load_tensors, newest_valid, read_state
from trainer_kit.checkpoint.save import Save
from trainer_kit.strategies.session import Session

Usage = namedtuple("Usage", "total used free")


class Release(Callback):
    """Lets the writer go on when a step has ended."""

    priority = 2000

    def __init__(self, step: int) -> None:
        self.step = step
        self.event = threading.Event()

    def on_step_end(self, run: Run) -> None:
        if run.state.step == self.step:
            self.event.set()


def held_back(monkeypatch: pytest.MonkeyPatch, wait: Callable[[], Any]) -> None:
    """Lets each write of a checkpoint begin with `wait()`."""
    write = contribution.write_part

    def patched(*args: Any, **kwargs: Any) -> Any:
        wait()
        return write(*args, **kwargs)

    monkeypatch.setattr(contribution, "write_part", patched)


def failing(monkeypatch: pytest.MonkeyPatch, *numbers: int, error: Exception | None = None) -> list[int]:
    """Lets the writes of these numbers, from 1, fail; the list grows with each write."""
    calls: list[int] = []

    def fail() -> None:
        calls.append(len(calls) + 1)
        if calls[-1] in numbers:
            raise error or OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "model.safetensors")

    held_back(monkeypatch, fail)
    return calls


def test_training_goes_on_while_a_checkpoint_of_its_own_step_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    release, watch = Release(7), Watch()
    held_back(monkeypatch, lambda: release.event.wait(60))
    make_trainer(tmp_path, release, watch, save_steps=4, save_total_limit=None, max_steps=12).train()
    assert [name for name, _ in watch.saved] == ["checkpoint-4", "checkpoint-8", "checkpoint-12"]
    assert watch.saved[0][1] in (7, 8)  # of a writer that was let go at step 7, before the next save at the latest
    for step in (4, 8, 12):
        saved = load_tensors(tmp_path / f"checkpoint-{step}")
        assert all(torch.equal(saved[name], value) for name, value in watch.weights[step].items()), step
        assert (read_state(tmp_path / f"checkpoint-{step}", "trainer") or {})["counters"]["step"] == step


@pytest.mark.parametrize("async_save", [True, False])
def test_one_save_at_a_time_and_none_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, async_save: bool
) -> None:
    at_work, most = [0], [0]
    write = Save.commit

    def counted(*args: Any, **kwargs: Any) -> Any:
        at_work[0] += 1
        most[0] = max(most[0], at_work[0])
        threading.Event().wait(0.02)
        path = write(*args, **kwargs)
        at_work[0] -= 1
        return path

    monkeypatch.setattr(Save, "commit", counted)
    watch = Watch()
    make_trainer(tmp_path, watch, save_steps=1, max_steps=6, async_save=async_save, eval_strategy="no").train()
    assert most == [1]
    assert at_work == [0]
    assert [name for name, _ in watch.saved] == [f"checkpoint-{step}" for step in range(1, 7)]
    if not async_save:
        assert [step for _, step in watch.saved] == [1, 2, 3, 4, 5, 6]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("checkpoint")]


def test_saving_beside_training_changes_no_bit(tmp_path: Path) -> None:
    digests = set()
    for async_save in (True, False):
        trainer = make_trainer(tmp_path / str(async_save), async_save=async_save)
        trainer.train()
        digests.add(digest(trainer))
    assert len(digests) == 1
    a, b = (load_tensors(tmp_path / str(each) / "checkpoint-24" / "state", "optimizer") for each in (True, False))
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_an_error_waits_for_the_save_that_was_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Raise(Callback):
        def on_step_end(self, run: Run) -> None:
            if run.state.step == 5:
                threading.Timer(0.2, begun.set).start()
                raise ValueError("broken")

    begun = threading.Event()
    held_back(monkeypatch, lambda: begun.wait(60))
    with pytest.raises(RuntimeError, match="broken"):
        make_trainer(tmp_path, Raise()).train()
    assert newest_valid(tmp_path, print) == tmp_path / "checkpoint-4"


@pytest.mark.timeout(60)
def test_an_error_in_a_save_that_training_waits_for_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as torch raises wherever the main thread is, when a data worker was killed."""
    failing(monkeypatch, 1, error=RuntimeError("DataLoader worker is killed"))
    with pytest.raises(RuntimeError, match="worker is killed"):
        make_trainer(tmp_path, async_save=False).train()


def test_a_failed_save_is_a_warning_and_the_next_tries_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    failing(monkeypatch, 2, 3)
    watch = Watch()
    trainer = make_trainer(tmp_path / "run", watch)
    trainer.train()
    assert [name for name, _ in watch.saved] == [f"checkpoint-{step}" for step in (4, 16, 20, 24)]
    told = [record.message for record in caplog.records if "could not be written" in record.message]
    assert len(told) == 2
    assert "the checkpoint of step 8 could not be written" in told[0]
    assert "No space left on device" in told[0]
    assert "the newest checkpoint is" in told[0]
    assert "checkpoint-4" in told[0]
    assert "(2 failed so far)" in told[1]
    expected = make_trainer(tmp_path / "straight")
    monkeypatch.undo()
    expected.train()
    assert digest(trainer) == digest(expected)


def test_a_failed_last_save_is_tried_twice_and_then_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = failing(monkeypatch, 3, 4)
    trainer = make_trainer(tmp_path, max_steps=12)
    with pytest.raises(SaveError, match=r"the checkpoint of step 12 could not be written: .*; the newest checkpoint"):
        trainer.train()
    assert calls == [1, 2, 3, 4]
    assert names(tmp_path) == ["checkpoint-4", "checkpoint-8"]
    assert read_log(tmp_path / "log.jsonl")[-1]["event"] == "exception"
    monkeypatch.undo()
    failing(monkeypatch, 3)
    make_trainer(tmp_path / "second", max_steps=12).train()
    assert names(tmp_path / "second") == ["checkpoint-4", "checkpoint-8", "checkpoint-12"]


@pytest.mark.parametrize("async_save", [True, False])
def test_raise_ends_the_run_at_the_first_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, async_save: bool
) -> None:
    failing(monkeypatch, 2, error=PermissionError(errno.EACCES, "Permission denied", "x"))
    with pytest.raises(SaveError, match=r"step 8 could not be written: \[Errno 13\] Permission denied"):
        make_trainer(tmp_path, save_failures="raise", async_save=async_save).train()
    assert names(tmp_path) == ["checkpoint-4"]


def test_a_folder_removed_meanwhile_is_made_again(tmp_path: Path) -> None:
    class Remove(Callback):
        def on_step_end(self, run: Run) -> None:
            if run.state.step == 6:
                shutil.rmtree(tmp_path / "run", ignore_errors=True)  # the writer may be at work in it

    make_trainer(tmp_path / "run", Remove(), save_total_limit=2, async_save=False).train()
    assert names(tmp_path / "run") == ["checkpoint-20", "checkpoint-24"]


def test_a_state_that_no_checkpoint_can_hold_is_told_after_the_first_step(tmp_path: Path) -> None:
    class Odd(Callback):
        def state_dict(self) -> dict[str, Any]:
            return {"odd": object()}

    trainer = make_trainer(tmp_path, Odd())
    with pytest.raises(TypeError, match=r"the state 'callbacks' cannot be saved: .*odd"):
        trainer.train()
    assert trainer.run.state.step == 1


@pytest.mark.parametrize(
    ("arguments", "count"),
    [
        ({"save_total_limit": 2}, 3),
        ({"save_total_limit": None}, 6),
        ({"save_total_limit": 99}, 7),
        ({"save_total_limit": 2, "metric_for_best_model": "loss", "save_best_limit": 2}, 5),
        ({"save_total_limit": 1, "save_keep_every": 3}, 4),
        ({"save_strategy": "epoch", "save_total_limit": None}, 3),
    ],
    ids=str,
)
def test_too_little_space_is_told_at_the_start_with_figures(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    arguments: dict[str, Any],
    count: int,
) -> None:
    sizes: list[int] = []
    monkeypatch.setattr(async_saver.shutil, "disk_usage", lambda path: Usage(0, 0, sizes[0]))
    for free, warned in ((10**9, False), (1000, True)):
        sizes[:] = [free]
        caplog.clear()
        make_trainer(tmp_path / str(free), **arguments).train()
        told = [record.message for record in caplog.records if "may run out of space" in record.message]
        assert len(told) == warned
    assert f"{count} more checkpoints of " in told[0]
    folder = tmp_path / "1000" / "checkpoint-24"
    stems = {path.with_suffix("") for path in folder.rglob("*.safetensors")}
    tensors = [each for stem in stems for each in load_tensors(stem.parent, stem.name).values()]
    size = sum({each.data_ptr(): each.nbytes for each in tensors}.values())
    assert f" of {size / 1024:.4g} KiB take " in told[0]


class Judge:
    """A metric that follows a list, one value an evaluation."""

    def __init__(self, values: list[float], step: Callable[[], int]) -> None:
        self.values = values
        self.step = step

    def __call__(self, prediction: Any) -> dict[str, float]:
        return {"score": self.values[self.step() // 4 - 1]}


def judged(folder: Path, *callbacks: Callback, **changes: Any) -> Any:
    trainer = make_trainer(
        folder, *callbacks, metric_for_best_model="score", greater_is_better=True, save_total_limit=1,
        save_best_limit=2, save_keep_every=3, **changes,
    )  # fmt: skip
    trainer.compute_metrics = Judge([3.0, 1.0, 2.0, 5.0, 1.0, 0.0], lambda: trainer.run.state.step)
    return trainer


class StopAt(Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, run: Run) -> None:
        if run.state.step == self.step:
            run.requests.stop = True


def test_the_newest_the_best_and_every_third_stay_over_restarts(tmp_path: Path) -> None:
    judged(tmp_path / "straight").train()
    assert names(tmp_path / "straight") == [f"checkpoint-{step}" for step in (4, 12, 16, 24)]
    judged(tmp_path / "twice", StopAt(12)).train()
    assert names(tmp_path / "twice") == [f"checkpoint-{step}" for step in (4, 12)]
    judged(tmp_path / "twice").train(resume_from_checkpoint=True)
    assert names(tmp_path / "twice") == names(tmp_path / "straight")


def test_a_checkpoint_written_again_after_a_resume_is_still_the_best(tmp_path: Path) -> None:
    changes = {"save_total_limit": 1, "save_best_limit": 2, "metric_for_best_model": "eval_loss"}
    make_trainer(tmp_path, **changes, max_steps=8).train()
    make_trainer(tmp_path, SaveFirst(), **changes, max_steps=8).train(resume_from_checkpoint=True)
    committed = (read_state(tmp_path / "checkpoint-8", "trainer") or {})["committed"]
    assert [name for name, _, _ in committed] == ["checkpoint-4", "checkpoint-8"]
    assert all(metric is not None for _, _, metric in committed)


class LeaveInEvaluation(Callback):
    """Is told to leave in the first evaluation."""

    def on_evaluate_begin(self, run: Run) -> None:
        if run.state.step == 4:
            signal.raise_signal(signal.SIGTERM)


def test_an_evaluation_that_was_broken_off_counts_for_its_checkpoint(tmp_path: Path) -> None:
    changes = {"save_total_limit": 1, "metric_for_best_model": "eval_loss", "max_steps": 8}
    with pytest.raises(SystemExit):
        make_trainer(tmp_path, LeaveInEvaluation(), **changes).train()
    make_trainer(tmp_path, **changes).train(resume_from_checkpoint=True)
    committed = (read_state(tmp_path / "checkpoint-8", "trainer") or {})["committed"]
    evaluations = [record["eval_loss"] for record in read_log(tmp_path / "log.jsonl") if "eval_loss" in record]
    assert [(name, metric) for name, _, metric in committed] == [
        ("checkpoint-4", evaluations[0]),
        ("checkpoint-8", evaluations[1]),
    ]


_auditors: list[Callable[[str, tuple[Any, ...]], None]] = []


def _hook(event: str, details: tuple[Any, ...]) -> None:
    for auditor in _auditors:
        auditor(event, details)


sys.addaudithook(_hook)  # one cannot be taken away again


def test_a_resume_reads_the_newest_checkpoint_alone(tmp_path: Path) -> None:
    make_trainer(tmp_path, StopAt(10), save_steps=1, save_total_limit=None).train()
    opened: set[str] = set()

    def audit(event: str, details: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(details[0], (str, os.PathLike)):
            parts = Path(details[0]).parts
            opened.update(part for part in parts if part.startswith("checkpoint-"))

    assert len(names(tmp_path)) == 10
    _auditors.append(audit)
    try:
        make_trainer(tmp_path, StopAt(11), save_strategy="no").train(resume_from_checkpoint=True)
    finally:
        _auditors.remove(audit)
    assert opened == {"checkpoint-10"}


def _of_ranks(folder: Path, fails: tuple[int, ...], **changes: Any) -> tuple[list[tuple[str, int]], str]:
    patch = pytest.MonkeyPatch()
    failing(patch, *fails)
    watch = Watch()
    try:
        trainer = make_trainer(folder, watch, strategy=DDP(), **changes)
        trainer.train()
        return watch.saved, digest(trainer)
    except SaveError as error:
        return watch.saved, str(error)
    finally:
        patch.undo()


@pytest.mark.distributed
def test_all_processes_hear_of_each_checkpoint_at_the_same_step(tmp_path: Path) -> None:
    (first, one), (second, two) = on_ranks(2, _of_ranks, tmp_path / "run", (2,))
    assert first == second
    assert [name for name, _ in first] == [f"checkpoint-{step}" for step in (4, 12)]
    assert one == two
    (_, one), (_, two) = on_ranks(2, _of_ranks, tmp_path / "raise", (2,), save_failures="raise")
    assert one == two
    assert "the checkpoint of step 8 could not be written" in one


def test_minutes_between_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]

    class Clock(Callback):
        def on_step_begin(self, run: Run) -> None:
            now[0] += 25.0

    monkeypatch.setattr("trainer_kit.callbacks.checkpointing.time.monotonic", lambda: now[0])
    watch = Watch()
    make_trainer(
        tmp_path, Clock(), watch, save_strategy="minutes", save_minutes=1, max_steps=10, async_save=False
    ).train()
    assert [step for _, step in watch.saved] == [3, 6, 9, 10]


def test_warnings_of_one_run_count_from_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="trainer_kit"), pytest.MonkeyPatch.context() as patch:
        failing(patch, 1)
        make_trainer(tmp_path / "a", max_steps=8).train()
        make_trainer(tmp_path / "b", max_steps=8).train()
    assert caplog.text.count("could not be written") == 1
    assert "(1 failed so far)" in caplog.text
    assert "there is no other checkpoint" in caplog.text


def test_a_folder_that_is_gone_when_its_space_is_looked_at(tmp_path: Path) -> None:
    class Remove(Callback):
        def on_step_end(self, run: Run) -> None:
            if run.state.step == 1:
                shutil.rmtree(tmp_path / "run")

    make_trainer(tmp_path / "run", Remove(), max_steps=8).train()
    assert names(tmp_path / "run") == ["checkpoint-4", "checkpoint-8"]


def test_what_the_models_files_refuse_is_told_after_the_first_step(tmp_path: Path) -> None:
    class Tokenizer:
        def save_pretrained(self, directory: Path) -> None:
            raise ValueError("this tokenizer cannot be saved")

    trainer = make_trainer(tmp_path)
    trainer.run.processing_class = Tokenizer()
    with pytest.raises(ValueError, match="this tokenizer cannot be saved"):
        trainer.train()
    assert trainer.run.state.step == 1


def test_the_launcher_hears_of_a_checkpoint_that_an_error_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Raise(Callback):
        def on_step_end(self, run: Run) -> None:
            if run.state.step == 5:
                threading.Timer(0.1, begun.set).start()
                raise ValueError("broken")

    told: list[int] = []
    monkeypatch.setattr(Session, "report_saved_step", lambda self, step: told.append(step))
    begun = threading.Event()
    held_back(monkeypatch, lambda: begun.wait(60))
    with pytest.raises(RuntimeError, match="broken"):
        make_trainer(tmp_path, Raise()).train()
    assert told == [4]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("checkpoint")]


def test_retention_leaves_what_somebody_put_in_a_checkpoints_place(tmp_path: Path) -> None:
    make_trainer(tmp_path / "one", StopAt(12), save_total_limit=None).train()
    make_trainer(tmp_path / "two", StopAt(4), save_total_limit=None).train()
    shutil.rmtree(tmp_path / "one" / "checkpoint-4")
    shutil.copytree(tmp_path / "two" / "checkpoint-4", tmp_path / "one" / "checkpoint-4")
    make_trainer(tmp_path / "one", save_total_limit=1).train(resume_from_checkpoint=True)
    assert names(tmp_path / "one") == ["checkpoint-4", "checkpoint-12", "checkpoint-24"]


@pytest.mark.slow
def test_lists_too_long_for_a_checkpoint_are_told_after_the_first_step(tmp_path: Path) -> None:
    class Long(Callback):
        def state_dict(self) -> dict[str, Any]:
            return {"seen": [1] * 5_000_000}

    trainer = make_trainer(tmp_path, Long())
    with pytest.raises(ValueError, match=r"the state 'callbacks' holds too long lists for a checkpoint"):
        trainer.train()
    assert trainer.run.state.step == 1
