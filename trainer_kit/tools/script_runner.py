"""`run_script`: runs a user's script in this process, with its training taken over."""

from __future__ import annotations

import contextlib
import functools
import multiprocessing.util
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn, Protocol

from trainer_kit.launch import script
from trainer_kit.launch.failures import write_failure
from trainer_kit.run import TrainOutput
from trainer_kit.trainer import Trainer

_OWN_FILES = (__file__, script.__file__, "<frozen importlib._bootstrap>", "<frozen importlib._bootstrap_external>")
"""Files of what runs the user's script, which a traceback leaves out."""

Train = Callable[[bool | str | Path | None], TrainOutput]
"""The Trainer's own `train`, bound to it; its argument is `resume_from_checkpoint`."""


class TakeOver(Protocol):
    """What a tool does in place of the script's first `Trainer.train`."""

    def __call__(self, trainer: Trainer, train: Train, resume_from_checkpoint: bool | str | Path | None) -> int:
        """Takes over the call.

        Args:
            trainer: The user's Trainer.
            train: Trains it as if nothing had been taken over.
            resume_from_checkpoint: What the script asked for.

        Returns:
            The exit code of the process, which ends.
        """


def run_script(words: Sequence[str], take_over: TakeOver) -> None:
    """Runs a script, or a module, as the main program, up to its call of `Trainer.train`.

    There `take_over` is called, and the process ends with its exit code, or with its error: neither comes back to the
    script, whose `finally` might save the weights of half a training over good ones. The method is replaced for good,
    on the class: the process belongs to the tool.

    Args:
        words: The script, or "-m" and a module, then its arguments.
        take_over: Called with the Trainer, its own `train` and what the script wanted to resume from.

    Raises:
        BaseException: What the script raises, SystemExit too, before it trains.
    """
    train = Trainer.train

    @functools.wraps(train)
    def taken(self: Trainer, resume_from_checkpoint: bool | str | Path | None = None) -> NoReturn:
        try:
            code = take_over(self, functools.partial(train, self), resume_from_checkpoint)
        except BaseException as error:
            code = _show(error)
        leave(code)

    Trainer.train = taken  # type: ignore[method-assign]
    script.run_as_main([*words])


def run_until_training(words: Sequence[str], take_over: TakeOver) -> NoReturn:
    """Runs a script as `run_script` does, and says what is wrong with one that does not come to its training.

    Args:
        words: As for `run_script`.
        take_over: The same.

    Raises:
        ValueError: If the script fails before it trains, or never does. Its own traceback has been shown then.
    """
    name = words[1] if words[0] == "-m" else words[0]
    try:
        run_script(words, take_over)
    except SystemExit as error:
        how = error.code if isinstance(error.code, str) else f"code {error.code or 0}"
        raise ValueError(f"{name} left ({how}) before it called Trainer.train") from error
    except Exception as error:
        traceback.print_exception(type(error), error, write_failure(error, own_files=_OWN_FILES))
        raise ValueError(f"{name} raised before it called Trainer.train: {type(error).__name__}") from error
    raise ValueError(f"{name} never called Trainer.train; give the script that trains")


def leave(code: int) -> NoReturn:
    """Ends this process, and nothing of the script runs any more: no `except`, no `finally`, no atexit."""
    # What multiprocessing does at the end of a process: it leaves process groups and closes pools and managers.
    multiprocessing.util._run_finalizers(0)  # type: ignore[attr-defined]
    for child in multiprocessing.active_children():
        child.terminate()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # closed, or nobody reads it
            stream.flush()
    os._exit(code)


def _show(error: BaseException) -> int:
    """Shows an error as the interpreter does at the end, and to the launcher if there is one; gives the exit code."""
    if isinstance(error, SystemExit) and (error.code is None or isinstance(error.code, int)):
        return error.code or 0
    sys.excepthook(type(error), error, write_failure(error, own_files=_OWN_FILES))
    return 130 if isinstance(error, KeyboardInterrupt) else 1
