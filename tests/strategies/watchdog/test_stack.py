"""Where a thread is, from its frames."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import trainer_kit
from trainer_kit.strategies.watchdog.stack import StackLocation, locate

PACKAGE = Path(trainer_kit.__file__).parent
TORCH = Path(torch.__file__).parent


def seen(*calls: tuple[Path, str]) -> StackLocation:
    """Where a thread is whose functions of these files and names call one another; the last one looks."""
    found: list[StackLocation] = []
    inner: Callable[[], Any] = lambda: found.append(locate(caller(sys._getframe())))  # noqa: E731
    for file, name in reversed(calls):
        names: dict[str, Any] = {"inner": inner}
        exec(compile(f"def {name}():\n    inner()", str(file), "exec"), names)
        inner = names[name]
    inner()
    return found[0]


def caller(frame: FrameType) -> FrameType | None:
    return frame.f_back


SCRIPT = (Path("project", "train.py"), "main")
LOOP = (PACKAGE / "loop" / "train_step.py", "_pass")
STRATEGY = PACKAGE / "strategies" / "ddp.py"
CHECKPOINT = PACKAGE / "checkpoint" / "format"


def test_a_collective_is_called_by_the_strategys_name() -> None:
    torchs = (TORCH / "distributed" / "distributed_c10d.py", "all_gather")
    where = seen(SCRIPT, LOOP, (STRATEGY, "all_reduce_ints"), (STRATEGY, "_all_gather"), torchs)
    assert where.waits
    assert where.place == "all_reduce_ints, called in _pass (loop/train_step.py:2)"


def test_a_collective_that_failed_is_called_by_the_strategys_name() -> None:
    """The error has passed through the method that encloses it."""
    group = PACKAGE / "strategies" / "process_group.py"
    where = seen(SCRIPT, LOOP, (STRATEGY, "all_reduce_ints"), (STRATEGY, "_all_gather"), (group, "watched"))
    assert where.place == "all_reduce_ints, called in _pass (loop/train_step.py:2)"


def test_a_backward_pass_waits() -> None:
    where = seen(SCRIPT, LOOP, (STRATEGY, "backward"), (TORCH / "autograd" / "graph.py", "_engine_run_backward"))
    assert where.waits
    assert where.place == "backward, called in _pass (loop/train_step.py:2)"


def test_torchs_own_name_where_no_strategy_took_part() -> None:
    torchs = TORCH / "distributed" / "distributed_c10d.py"
    where = seen(SCRIPT, (torchs, "barrier"), (torchs, "_wait"))
    assert where.waits
    assert where.place == "barrier, called in main (project/train.py:2)"


def test_the_users_code_inside_a_backward_pass_does_not_wait() -> None:
    hook = (Path("project", "model.py"), "hook")
    where = seen(SCRIPT, LOOP, (STRATEGY, "backward"), (TORCH / "autograd" / "graph.py", "run"), hook)
    assert where == StackLocation("hook (project/model.py:2)", waits=False, inside=False)


def test_a_library_is_named_with_its_caller() -> None:
    where = seen(SCRIPT, (Path("project", "data.py"), "load"), (Path(__import__("json").__file__), "raw_decode"))
    assert where == StackLocation("raw_decode, called in load (project/data.py:2)", waits=False, inside=False)


def test_the_engine_may_wait_for_a_gpu_but_not_while_it_saves() -> None:
    assert seen(SCRIPT, LOOP) == StackLocation("_pass (loop/train_step.py:2)", waits=False, inside=True)
    assert seen(SCRIPT, LOOP, (TORCH / "optim" / "adamw.py", "step")).inside
    save, write = (CHECKPOINT / "commit.py", "save"), (CHECKPOINT / "manifest.py", "write")
    assert not seen(SCRIPT, LOOP, save, write).inside
    assert not seen(SCRIPT, LOOP, save, (TORCH / "serialization.py", "save")).inside
    assert not seen(SCRIPT, (TORCH / "optim" / "adamw.py", "step")).inside


def test_where_an_error_was_raised() -> None:
    def fail() -> None:
        torch.distributed.get_rank(group=object())  # type: ignore[arg-type]

    try:
        fail()
    except Exception as error:  # whichever it is, torch.distributed raises it
        where = locate(sys._getframe(), error)
    assert where.waits
    assert where.place.startswith("get_rank, called in fail (watchdog/test_stack.py:")


def test_nothing_is_known_without_frames() -> None:
    assert locate(None) == StackLocation()
