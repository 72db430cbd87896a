"""`Preemption`: leaves a run in good order when it is told to end from outside."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from types import FrameType
from typing import TYPE_CHECKING, Any

from trainer_kit.callback import Callback

if TYPE_CHECKING:
    from trainer_kit.run import Run

_SIGNALS = ("SIGINT", "SIGTERM", "SIGUSR1")  # Windows has no SIGUSR1


class Preemption(Callback):
    """Ends training on Ctrl-C, SIGTERM and SIGUSR1 after a checkpoint; a second signal ends it at once.

    On the first signal the step is finished, a checkpoint saved (unless `args.save_strategy` is "no"), and the process
    leaves with exit code 130 (Ctrl-C) or 143. On the second one the signal does what it would have done without this
    callback. A signal that the process ignores stays ignored. Signals reach Python's main thread only: a training in
    another thread is left to its program.
    """

    def __init__(self) -> None:
        self._run: Run | None = None
        self._process = 0
        self._handlers: dict[int, Any] = {}

    def on_train_begin(self, run: Run) -> None:
        self._restore()
        if threading.current_thread() is not threading.main_thread():
            return
        self._run, self._process = run, os.getpid()
        for number in (getattr(signal, name) for name in _SIGNALS if hasattr(signal, name)):
            handler = signal.getsignal(number)
            if handler not in (None, signal.SIG_IGN):  # None: set outside Python, which cannot set it again
                self._handlers[number] = handler
                signal.signal(number, self._on_signal)

    def on_train_end(self, run: Run) -> None:
        self._restore()

    def on_exception(self, run: Run, error: BaseException) -> None:
        self._restore()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        run = self._run
        if os.getpid() != self._process:
            self._in_child(number)
        elif run is None or run.requests.exit_code is not None:
            self._restore()
            signal.raise_signal(number)
        else:
            saves = run.args.save_strategy != "no"
            run.requests.exit_code = 130 if number == signal.SIGINT else 143
            run.requests.save = run.requests.save or saves
            run.requests.stop = True
            then = "save a checkpoint and leave" if saves else "leave without a checkpoint (save_strategy='no')"
            _say(f"{signal.Signals(number).name}: will finish this step, {then}; once more leaves at once.")

    def _in_child(self, number: int) -> None:
        """A forked child (a data loader's worker) has this handler too; Ctrl-C is for its parent to act on."""
        if number != signal.SIGINT:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)

    def _restore(self) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._handlers = {}
        self._run = None


def _say(sentence: str) -> None:
    """Writes past Python's buffers: a signal may come while these are being written to, when they refuse a second."""
    with contextlib.suppress(OSError):
        os.write(2, f"\n{sentence}\n".encode())
