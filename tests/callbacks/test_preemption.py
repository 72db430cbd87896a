from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from trainer_kit.callbacks import Preemption
from trainer_kit.run import Run
from trainer_kit.state import Requests

NAMES = [name for name in ("SIGINT", "SIGTERM", "SIGUSR1") if hasattr(signal, name)]


@pytest.fixture(autouse=True)
def handlers() -> Iterator[dict[str, Any]]:
    """What the signals do before the test; it must be the same afterwards."""
    before = {name: signal.getsignal(getattr(signal, name)) for name in NAMES}
    yield before
    after = {name: signal.getsignal(getattr(signal, name)) for name in NAMES}
    for name, handler in before.items():
        signal.signal(getattr(signal, name), handler)
    assert after == before


@pytest.fixture
def run(make_run: Callable[..., Run]) -> Run:
    return make_run()


@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGTERM", 143), ("SIGUSR1", 143)])
def test_the_first_signal_asks_to_save_and_stop(
    run: Run, name: str, code: int, capfd: pytest.CaptureFixture[str]
) -> None:
    callback = Preemption()
    callback.on_train_begin(run)
    assert run.requests == Requests()
    signal.raise_signal(getattr(signal, name))
    assert run.requests == Requests(exit_code=code, reason=name)
    assert run.strategy.session.is_preempted
    (sentence,) = capfd.readouterr().err.strip().splitlines()
    assert sentence.startswith(f"{name}: will finish this step, save a checkpoint and exit")
    callback.on_exit(run)


def test_nothing_is_saved_where_saving_is_off(make_run: Callable[..., Run], capfd: pytest.CaptureFixture[str]) -> None:
    run, callback = make_run(save_strategy="no"), Preemption()
    callback.on_train_begin(run)
    signal.raise_signal(signal.SIGINT)
    callback.on_exit(run)
    assert run.requests == Requests(exit_code=130, reason="SIGINT")
    assert "without a checkpoint" in capfd.readouterr().err


def test_a_second_ctrl_c_leaves_at_once(run: Run) -> None:
    callback = Preemption()
    callback.on_train_begin(run)
    signal.raise_signal(signal.SIGINT)
    signal.raise_signal(signal.SIGINT)  # a launcher's, who got the same Ctrl-C and passes it on
    time.sleep(0.3)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_a_second_signal_of_another_kind_does_what_it_did_before(run: Run) -> None:
    heard = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    try:
        callback = Preemption()
        callback.on_train_begin(run)
        signal.raise_signal(signal.SIGINT)
        assert heard == []
        signal.raise_signal(signal.SIGTERM)
        assert heard == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("how", ["on_exit", "on_exception"])
def test_the_old_handlers_come_back(run: Run, handlers: dict[str, Any], how: str) -> None:
    callback = Preemption()
    for _ in range(2):  # a second training takes them again
        callback.on_train_begin(run)
        assert all(signal.getsignal(getattr(signal, name)) != handlers[name] for name in NAMES)
        getattr(callback, how)(run, *([ValueError()] if how == "on_exception" else []))
        assert {name: signal.getsignal(getattr(signal, name)) for name in NAMES} == handlers
    getattr(callback, how)(run, *([ValueError()] if how == "on_exception" else []))


def test_an_ignored_signal_stays_ignored(run: Run) -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        callback = Preemption()
        callback.on_train_begin(run)
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
        callback.on_exit(run)
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_another_thread_takes_no_signals(run: Run, handlers: dict[str, Any]) -> None:
    errors: list[BaseException] = []

    def train() -> None:
        try:
            callback = Preemption()
            callback.on_train_begin(run)
            callback.on_exit(run)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=train)
    thread.start()
    thread.join(timeout=60)
    assert errors == []
    assert {name: signal.getsignal(getattr(signal, name)) for name in NAMES} == handlers


@pytest.mark.parametrize(
    ("requeue", "code", "main", "exits", "said"),
    [
        (True, 143, True, 0, "the SLURM job 31 is back in the queue"),
        (True, 143, True, 1, "the SLURM job 31 could not be requeued: no such job"),
        (True, 143, False, 0, None),
        (True, 130, True, 0, None),
        (True, None, True, 0, None),
        (False, 143, True, 0, None),
    ],
)
def test_a_slurm_job_is_requeued_when_asked_to(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, requeue: bool,
    code: int | None, main: bool, exits: int, said: str | None,
) -> None:  # fmt: skip
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/called\necho no such job >&2\nexit {exits}\n')
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("SLURM_JOB_ID", "31")
    monkeypatch.setattr(type(run.strategy), "is_main", main)
    run.requests.exit_code = code
    callback = Preemption(requeue=requeue)
    with caplog.at_level("INFO", "trainer_kit"):
        callback.on_train_begin(run)
        callback.on_exit(run)
    assert (tmp_path / "called").exists() == (said is not None)
    if said is not None:
        assert (tmp_path / "called").read_text() == "requeue 31\n"
        assert said in caplog.text


@pytest.fixture
def requeued(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Signals that reach the handler which a job of submitit has installed."""
    monkeypatch.setenv("SUBMITIT_EXECUTOR", "slurm")
    heard: list[int] = []
    before = signal.signal(signal.SIGUSR2, lambda number, frame: heard.append(number))
    yield heard
    signal.signal(signal.SIGUSR2, before)


@pytest.mark.parametrize("first", [[], ["SIGTERM"]])
def test_submitit_requeues_after_the_checkpoint(run: Run, requeued: list[int], first: list[str]) -> None:
    """A scheduler's SIGTERM may come before the signal of submitit, which must not cut the save short."""
    callback = Preemption(requeue=True)  # submitit's own requeue is enough
    callback.on_train_begin(run)
    for name in (*first, "SIGUSR2"):
        signal.raise_signal(getattr(signal, name))
    assert run.requests == Requests(exit_code=143, reason=(*first, "SIGUSR2")[0], signal=signal.SIGUSR2)
    callback.on_exit(run)
    assert requeued == []  # the training raises the signal again once it has ended
    signal.raise_signal(signal.SIGUSR2)
    assert requeued == [signal.SIGUSR2]


def test_submitit_s_signal_can_have_another_name(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUBMITIT_EXECUTOR", "slurm")
    monkeypatch.setenv("SUBMITIT_PREEMPT_SIGNAL", "USR1")
    before = signal.signal(signal.SIGUSR1, lambda number, frame: None)
    callback, usr2 = Preemption(), signal.getsignal(signal.SIGUSR2)
    try:
        callback.on_train_begin(run)
        assert signal.getsignal(signal.SIGUSR2) == usr2
        signal.raise_signal(signal.SIGUSR1)
        assert run.requests == Requests(exit_code=143, reason="SIGUSR1", signal=signal.SIGUSR1)
        callback.on_exit(run)
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_child_of_submitit_s_job_has_no_handler_to_call(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUBMITIT_EXECUTOR", "slurm")
    assert signal.getsignal(signal.SIGUSR2) == signal.SIG_DFL
    callback = Preemption()
    callback.on_train_begin(run)
    signal.raise_signal(signal.SIGUSR2)
    assert run.requests == Requests(exit_code=143, reason="SIGUSR2")
    callback.on_exit(run)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize(("name", "status"), [("SIGINT", 0), ("SIGTERM", -15)])
def test_a_forked_child_leaves_ctrl_c_to_its_parent(name: str, status: int) -> None:
    """In a process of its own: a fork of the process that runs the tests would carry its threads' locks along."""
    code = f"""
import os, signal, sys, tempfile, types
from trainer_kit.callbacks import Preemption
from trainer_kit.state import Requests
run = types.SimpleNamespace(requests=Requests(), args=types.SimpleNamespace(save_strategy="steps"), strategy=None)
Preemption().on_train_begin(run)
child = os.fork()
if child == 0:
    signal.raise_signal(signal.{name})
    os._exit(0 if run.requests == Requests() else 3)
_, status = os.waitpid(child, 0)
assert run.requests == Requests()
print(os.waitstatus_to_exitcode(status))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert (done.stdout.strip(), done.stderr) == (str(status), "")


@pytest.mark.parametrize("is_told", [False, True], ids=["by another process", "and by the launcher"])
def test_a_process_that_leaves_with_others_is_not_ended_by_its_own_signal(
    is_told: bool, run: Run, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would leave them in their last collective."""
    heard, callback = list[int](), Preemption()
    before = signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    try:
        callback.on_train_begin(run)
        if is_told:
            signal.raise_signal(signal.SIGTERM)
        run.requests.exit_code = 143
        monkeypatch.setattr(type(run.strategy.collectives), "is_alone", False)
        callback.on_exit(run)
        capfd.readouterr()
        signal.raise_signal(signal.SIGTERM)
        assert heard == []
        assert ("SIGTERM: this process is about to exit" in capfd.readouterr().err) != is_told
        time.sleep(0.3)
        signal.raise_signal(signal.SIGTERM)
        assert heard == [signal.SIGTERM]
    finally:
        callback._restore()
        signal.signal(signal.SIGTERM, before)


def test_a_program_that_goes_on_after_it_has_left_has_its_handlers_again(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard, callback = list[int](), Preemption()
    before = signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    try:
        callback.on_train_begin(run)
        run.requests.exit_code = 143
        monkeypatch.setattr(type(run.strategy.collectives), "is_alone", False)
        callback.on_exit(run)
        monkeypatch.setattr("trainer_kit.callbacks.preemption._LEAVING", -1.0)
        signal.raise_signal(signal.SIGTERM)
        assert heard == [signal.SIGTERM]
    finally:
        callback._restore()
        signal.signal(signal.SIGTERM, before)


def test_the_signal_that_requeues_has_its_handler_at_the_end(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """`train()` raises it again, also in a run of several processes."""
    heard, callback = list[int](), Preemption()
    before = signal.signal(signal.SIGUSR2, lambda number, frame: heard.append(number))
    monkeypatch.setenv("SUBMITIT_PREEMPT_SIGNAL", "USR2")
    monkeypatch.setenv("SUBMITIT_EXECUTOR", "local")
    try:
        callback.on_train_begin(run)
        signal.raise_signal(signal.SIGUSR2)
        assert run.requests.signal == signal.SIGUSR2
        monkeypatch.setattr(type(run.strategy.collectives), "is_alone", False)
        callback.on_exit(run)
        signal.raise_signal(signal.SIGUSR2)
        assert heard == [signal.SIGUSR2]
    finally:
        callback._restore()
        signal.signal(signal.SIGUSR2, before)
