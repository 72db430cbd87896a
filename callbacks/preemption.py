"""`Preemption`: saves a checkpoint and ends the run after a signal."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import threading
import time
from types import FrameType
from typing import TYPE_CHECKING, Any

from trainer_kit.callback import Callback
from trainer_kit.config import environment

if TYPE_CHECKING:
    from trainer_kit.run import Run

_logger = logging.getLogger("trainer_kit")
_SIGNALS = ("SIGINT", "SIGTERM", "SIGUSR1")  # Windows has no SIGUSR1
_ONE_SIGNAL = 0.25
"""Seconds within which a repeated signal counts as one: a scheduler or a terminal signals both the launcher and its
processes, and the launcher forwards the signal."""

_LEAVING = 10.0
"""Seconds in which a process leaves after its last hook."""


class Preemption(Callback):
    """End training on Ctrl-C, SIGTERM and SIGUSR1 after a checkpoint; a second signal ends it immediately.

    After the first signal to any process of the run, all processes finish the same step, save one checkpoint (unless
    `args.save_strategy` is "no") and exit with code 130 (Ctrl-C) or 143 (a request for a restart). The second signal,
    more than 0.25 seconds after the first, has its effect without this callback. A signal that the process ignores
    stays ignored. Python delivers signals to the main thread only, so a training in another thread does not handle
    them.

    In a job of submitit, the signal that requeues the job (SIGUSR2, or `SUBMITIT_PREEMPT_SIGNAL`) is handled too:
    submitit's own handler, which calls `checkpoint()` and requeues, runs after the checkpoint is saved.

    Args:
        requeue: Whether to requeue a SLURM job (`scontrol requeue`) that SIGTERM or SIGUSR1 ended. `train()` of the
            restarted job then resumes from the newest checkpoint. Without effect where submitit requeues the job.
    """

    def __init__(self, requeue: bool = False) -> None:
        self.requeue = requeue
        self._run: Run | None = None
        self._process = 0
        self._told: tuple[int, float] | None = None  # the first signal, and when it came
        self._left_at = 0.0
        self._handlers: dict[int, Any] = {}
        self._requeues: int | None = None  # the signal whose handler, submitit's, requeues the job

    def on_train_begin(self, run: Run) -> None:
        self._restore()
        if threading.current_thread() is not threading.main_thread():
            return
        self._run, self._process, self._told = run, os.getpid(), None
        requeues = environment.submitit_signal() or ""
        self._requeues = getattr(signal, requeues, None)
        for number in {getattr(signal, name) for name in (*_SIGNALS, requeues) if hasattr(signal, name)}:
            handler = signal.getsignal(number)
            if handler not in (None, signal.SIG_IGN):  # None: set outside Python, which cannot restore it
                self._handlers[number] = handler
                signal.signal(number, self._on_signal)

    def on_exit(self, run: Run) -> None:
        requests = run.requests
        if requests.exit_code is None or requests.signal is not None or run.strategy.collectives.is_alone:
            self._restore()
        else:  # its own signal, or its launcher's, may come late, and must not end it before the others have left too
            self._run, self._left_at = None, time.monotonic()
        leaves = requests.exit_code == 143 and requests.signal is None
        if self.requeue and leaves and run.strategy.is_main:
            _requeue()

    def on_exception(self, run: Run, error: BaseException) -> None:
        self._restore()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        run = self._run
        if os.getpid() != self._process:
            self._in_child(number)
        elif (self._told is not None and not self._goes_on(number)) or self._has_left():
            self._restore()
            signal.raise_signal(number)
        elif run is not None:
            if number == self._requeues and callable(self._handlers[number]):
                run.requests.signal = number
            if self._told is None:
                self._begin_exit(run, number)
        elif self._told is None:
            self._told = number, time.monotonic()
            _say(f"{signal.Signals(number).name}: this process is about to exit; a second signal exits immediately.")

    def _has_left(self) -> bool:
        """Return whether the training ended a while ago, in a program that has gone on after its SystemExit."""
        return self._run is None and time.monotonic() > self._left_at + _LEAVING

    def _begin_exit(self, run: Run, number: int) -> None:
        """Request a checkpoint and the end of the training, on all processes."""
        self._told = number, time.monotonic()
        saves = run.args.save_strategy != "no"
        run.requests.reason = signal.Signals(number).name
        run.requests.exit_code = 130 if number == signal.SIGINT else 143
        run.strategy.session.announce_preemption()
        then = "save a checkpoint and exit" if saves else "exit without a checkpoint (save_strategy='no')"
        _say(f"{signal.Signals(number).name}: will finish this step, {then}; a second signal exits immediately.")

    def _goes_on(self, number: int) -> bool:
        """Return whether a later signal gives the run time: a repeated one, or submitit's after a scheduler's."""
        assert self._told is not None
        first, when = self._told
        return time.monotonic() < when + _ONE_SIGNAL if number == first else number == self._requeues

    def _in_child(self, number: int) -> None:
        """Handle a signal in a forked child (a data loader's worker), which leaves Ctrl-C to its parent."""
        if number != signal.SIGINT:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)

    def _restore(self) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._handlers = {}
        self._run = None


def _requeue() -> None:
    job = environment.slurm_job()
    if job is None:
        _logger.warning("Preemption(requeue=True) has no effect outside a SLURM job")
        return
    try:
        subprocess.run(["scontrol", "requeue", job], check=True, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.SubprocessError) as error:
        said = (getattr(error, "stderr", None) or str(error)).strip()
        _logger.warning("the SLURM job %s could not be requeued: %s", job, said)
    else:
        _logger.info("the SLURM job %s is back in the queue", job)


def _say(sentence: str) -> None:
    """Write to stderr without Python's buffers, which refuse a write from a signal handler during another write."""
    with contextlib.suppress(OSError):
        os.write(2, f"\n{sentence}\n".encode())
