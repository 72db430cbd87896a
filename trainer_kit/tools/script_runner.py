"""`run_script`: runs a user's script in this process, and takes over its training."""

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
"""Files that run the user's script; tracebacks omit them."""

Train = Callable[[bool | str | Path | None], TrainOutput]
"""The Trainer's own `train`, bound to it; its argument is `resume_from_checkpoint`."""


class TakeOver(Protocol):
    """Replacement for the script's first call of `Trainer.train`."""

    def __call__(self, trainer: Trainer, train: Train, resume_from_checkpoint: bool | str | Path | None) -> int:
        """Handle the call.

        Args:
            trainer: The user's Trainer.
            train: The original method, bound to the Trainer.
            resume_from_checkpoint: The script's argument.

        Returns:
            The exit code of the process, which then ends.
        """


def run_script(words: Sequence[str], take_over: TakeOver) -> None:
    """Run a script, or a module, as the main program, up to its call of `Trainer.train`.

    The call runs `take_over` instead, and the process ends with its exit code or its error. Neither returns to the
    script, whose `finally` might overwrite good weights with those of a partial training. The method is replaced
    permanently on the class, since the process belongs to the tool.

    Args:
        words: The script, or "-m" and a module, then its arguments.
        take_over: Called with the Trainer, its original `train` and the script's `resume_from_checkpoint`.

    Raises:
        BaseException: Any error of the script before it trains, including SystemExit.
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
    """Run a script as `run_script` does, and raise an error if it does not reach its training.

    Args:
        words: The script, or "-m" and a module, then its arguments.
        take_over: Called in place of `Trainer.train`.

    Raises:
        ValueError: If the script fails before it trains, after its own traceback is shown, or never trains.
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
    """End this process without running anything more of the script: no `except`, no `finally`, no atexit."""
    # multiprocessing's own exit handlers: they leave process groups and close pools and managers.
    multiprocessing.util._run_finalizers(0)  # type: ignore[attr-defined]
    for child in multiprocessing.active_children():
        child.terminate()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # closed, or a pipe without a reader
            stream.flush()
    os._exit(code)


def _show(error: BaseException) -> int:
    """Show an error to the user and the launcher, as the interpreter does at its end; return the exit code."""
    if isinstance(error, SystemExit) and (error.code is None or isinstance(error.code, int)):
        return error.code or 0
    sys.excepthook(type(error), error, write_failure(error, own_files=_OWN_FILES))
    return 130 if isinstance(error, KeyboardInterrupt) else 1
