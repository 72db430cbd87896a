from __future__ import annotations

import logging
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tqdm

from trainer_kit.callbacks import Progress
from trainer_kit.run import Run


class Screen:
    """What stderr shows."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self.capsys = capsys
        self.text = ""

    def getvalue(self) -> str:
        captured = self.capsys.readouterr()
        assert captured.out == ""
        self.text += captured.err
        return self.text

    def lines(self) -> list[str]:
        """As on a terminal: a carriage return goes back to the beginning of the line, which is then overwritten."""
        lines = []
        for text in self.getvalue().split("\n"):
            line = ""
            for part in text.split("\r"):
                line = part + line[len(part) :]
            lines.append(line.rstrip())
        return lines


@pytest.fixture
def screen(capsys: pytest.CaptureFixture[str]) -> Iterator[Screen]:
    yield Screen(capsys)
    assert not getattr(tqdm.tqdm, "_instances", ()), "a bar was left open"


def test_the_bar_goes_to_the_end(make_run: Callable[..., Run], take_step: Any, screen: Screen) -> None:
    run, callback = make_run(), Progress()
    callback.on_train_begin(run)
    for _ in range(10):
        take_step(run)
        callback.on_step_end(run)
    record = {"step": 10, "epoch": 2.0, "loss": 0.51234, "learning_rate": 1e-4, "samples_per_second": 80.0, "other": 1}
    callback.on_log(run, record)
    callback.on_train_end(run, None)
    (line, _) = screen.lines()
    assert re.match(r"train: 100%\|.*\| 10/10 \[", line)
    assert line.endswith("epoch 2  loss 0.5123  lr 0.0001  samples/s 80  other 1]")


def test_a_resumed_bar_starts_where_the_run_does(make_run: Callable[..., Run], screen: Screen) -> None:
    run, callback = make_run(), Progress()
    run.state.step = 7
    callback.on_train_begin(run)
    run.state.step = 8
    callback.on_step_end(run)
    callback.on_exception(run, ValueError())
    assert "| 7/10 [" in screen.getvalue()
    assert "80%" in screen.lines()[0]


def test_what_is_written_meanwhile_stands_above_the_bar(make_run: Callable[..., Run], screen: Screen) -> None:
    run, callback = make_run(), Progress()
    logger = logging.getLogger("trainer_kit")
    handler = logging.StreamHandler()
    logger.addHandler(handler)
    try:
        callback.on_train_begin(run)
        callback.on_step_end(run)
        logger.warning("a checkpoint was passed over")
        callback.on_evaluate_begin(run)
        callback.on_evaluate_end(run, None)
        callback.on_evaluate(run, {"eval_loss": 0.25, "eval_accuracy": 1.0})
        callback.on_train_end(run, {"train_loss": 0.5, "train_runtime": 2.0})
        assert logger.handlers == [handler]
        logger.warning("after training")
    finally:
        logger.removeHandler(handler)
    assert screen.lines()[:3] == [
        "a checkpoint was passed over",
        "step 0  eval_loss 0.25  eval_accuracy 1",
        "train_loss 0.5  train_runtime 2",
    ]
    assert screen.lines()[3].startswith("train:  10%|")
    assert screen.lines()[4:] == ["after training", ""]


def test_a_message_is_shown_once_where_no_logger_is_set_up(
    make_run: Callable[..., Run], screen: Screen, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.root, "handlers", [])
    monkeypatch.setattr(logging.getLogger("trainer_kit"), "handlers", [])
    other = logging.getLogger("another_library")
    monkeypatch.setattr(other, "handlers", [logging.StreamHandler()])
    monkeypatch.setattr(other, "propagate", False)
    run, callback = make_run(), Progress()
    callback.on_train_begin(run)
    logging.getLogger("trainer_kit").warning("take care")
    other.warning("it too")
    callback.on_train_end(run, None)
    assert logging.root.handlers == []
    assert screen.lines()[:2] == ["take care", "it too"]
    assert screen.getvalue().count("take care") == 1


def test_the_bar_says_when_it_evaluates(make_run: Callable[..., Run], screen: Screen) -> None:
    run, callback = make_run(), Progress()
    callback.on_train_begin(run)
    callback.on_evaluate_begin(run)
    assert screen.lines()[-1].startswith("evaluate:")
    callback.on_evaluate_end(run, None)
    callback.on_train_end(run, None)
    assert screen.lines()[-2].startswith("train:")


def descriptions(run: Run, callback: Progress, screen: Screen, take_step: Any, steps: int) -> list[str]:
    """What the bar is called within each step."""
    found = []
    for _ in range(steps):
        callback.on_step_begin(run)
        found.append(screen.lines()[-1].partition(":")[0])
        take_step(run)
        callback.on_step_end(run)
    assert screen.lines()[-1].startswith("train:")
    return found


@pytest.mark.parametrize("step", [0, 7])
def test_the_bar_says_that_the_first_steps_of_a_start_are_compiled(
    make_run: Callable[..., Run], screen: Screen, take_step: Any, step: int
) -> None:
    run, callback = make_run(), Progress()
    run.strategy.static_shapes = True
    run.state.step = step
    callback.on_train_begin(run)
    shown = descriptions(run, callback, screen, take_step, 3)
    assert shown == [f"compiling (step {step + 1})", f"compiling (step {step + 2})", "train"]
    callback.on_evaluate_begin(run)
    assert screen.lines()[-1].startswith("evaluate (compiling first):")
    callback.on_evaluate_end(run, None)
    callback.on_evaluate_begin(run)
    assert screen.lines()[-1].startswith("evaluate:")
    callback.on_train_end(run, None)


@pytest.mark.parametrize(
    ("compiles", "first"), [(True, "compiling (step 1)"), ({}, "compiling (step 1)"), (False, "train")]
)
def test_with_torch_compile_it_is_the_first_step(
    make_run: Callable[..., Run], screen: Screen, take_step: Any, compiles: Any, first: str
) -> None:
    run, callback = make_run(torch_compile=compiles), Progress()
    callback.on_train_begin(run)
    assert descriptions(run, callback, screen, take_step, 2) == [first, "train"]
    callback.on_train_end(run, None)


def test_a_warning_stands_above_the_bar(
    make_run: Callable[..., Run], screen: Screen, monkeypatch: pytest.MonkeyPatch
) -> None:
    def show(message: Warning | str, *details: Any, **more: Any) -> None:
        sys.stderr.write(f"{message}\n")

    monkeypatch.setattr(warnings, "showwarning", show)
    run, callback = make_run(), Progress()
    callback.on_train_begin(run)
    warnings.showwarning("take care", UserWarning, "file.py", 1)
    callback.on_train_end(run, None)
    assert warnings.showwarning is show
    assert screen.lines()[0] == "take care"
    assert screen.lines()[1].startswith("train:")


def test_an_evaluation_without_training_has_its_line(make_run: Callable[..., Run], screen: Screen) -> None:
    run, callback = make_run(), Progress()
    callback.on_evaluate_begin(run)
    callback.on_evaluate(run, {"eval_loss": 0.25})
    assert screen.lines() == ["step 0  eval_loss 0.25", ""]


def test_other_processes_show_nothing(make_run: Callable[..., Run], screen: Screen) -> None:
    run, callback = make_run(rank=1), Progress()
    callback.on_train_begin(run)
    callback.on_step_end(run)
    callback.on_log(run, {"loss": 1.0})
    callback.on_evaluate(run, {"eval_loss": 1.0})
    callback.on_train_end(run, None)
    assert screen.getvalue() == ""


def test_a_run_that_goes_back_moves_the_bar_back(make_run: Callable[..., Run], screen: Screen) -> None:
    run, callback = make_run(), Progress()
    callback.on_train_begin(run)
    for step in range(1, 6):
        run.state.step = step
        callback.on_step_end(run)
    run.state.step, run.total_steps = 2, 9
    callback.on_rollback(run, Path("checkpoint-2"))
    callback.on_step_end(run)
    callback.on_train_end(run, None)
    assert "| 3/9 [" in screen.lines()[0]
