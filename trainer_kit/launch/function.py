"""`Function`: calls a function in a process that a launcher started."""

from __future__ import annotations

import os
import pickle
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from trainer_kit.config import environment
from trainer_kit.launch.failures import LEAVING, is_reported, write_failure
from trainer_kit.utils.streams import guard_standard_streams
from trainer_kit.utils.thread_pool import renew_thread_pool

# A forked process must not keep its parent's handlers.
_SIGNALS: dict[str, Any] = {"SIGINT": signal.default_int_handler, "SIGTERM": signal.SIG_DFL, "SIGUSR1": signal.SIG_DFL}

# Frames of these files are hidden from the user.
_OWN_FILES = (__file__, str(Path(__file__).with_name("payload.py")))


class Function:
    """The callable that torch's agent runs in each process; it writes the value or the error to a file.

    Until it runs, the new process shares the terminal's session and gets Ctrl-C from the terminal and from the
    launcher. It then starts its own session.

    Args:
        function: The user's function.
        args: Arguments of the function.
    """

    def __init__(self, function: Callable[..., Any], args: Sequence[Any]) -> None:
        self.function = function
        self.args = tuple(args)
        self.__name__ = self.__qualname__ = "Function"  # torch's agent reads them

    def __call__(self) -> None:
        """Call the function.

        Raises:
            SystemExit: With code 1 after an exception, with 130 after Ctrl-C, or the function's own.
        """
        self._set_up_process()
        try:
            if hasattr(signal, "pthread_sigmask"):
                signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # the agent has blocked it
            self._keep(self._called())
        except KeyboardInterrupt:
            raise SystemExit(130) from None
        except SystemExit as error:
            if error.code not in LEAVING:
                write_failure(error, own_files=_OWN_FILES)
            raise
        except BaseException as error:
            trace = write_failure(error, own_files=_OWN_FILES)
            if not is_reported():
                sys.excepthook(type(error), error, trace)
            sys.stdout.flush()
            raise SystemExit(1) from None

    def _set_up_process(self) -> None:
        for name, handler in _SIGNALS.items():
            if hasattr(signal, name):
                signal.signal(getattr(signal, name), handler)
        if hasattr(os, "setsid"):
            os.setsid()
        guard_standard_streams()
        if environment.use_tpu():
            renew_thread_pool()

    def _called(self) -> Any:
        try:
            return self.function(*self.args)
        except SystemExit as error:
            if error.code in (0, None):
                return None
            raise

    def _keep(self, value: Any) -> None:
        path = value_file(os.environ["TORCHELASTIC_ERROR_FILE"])
        unfinished = path.with_suffix(".unfinished")
        try:
            unfinished.write_bytes(pickle.dumps(value))
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            raise TypeError(
                f"the value that {getattr(self.function, '__name__', self.function)} returned cannot be sent back from "
                f"its process ({error}); return plain data, or write it to a file"
            ) from error
        unfinished.replace(path)


def value_file(error_file: str) -> Path:
    """Return the file for the value of the rank whose error goes to `error_file`."""
    return Path(error_file.removesuffix(".error.json") + ".value")
