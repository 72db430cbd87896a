"""`Deaths`: raises the death of a data worker where its batch is read.

torch raises it in its handler of SIGCHLD, and so wherever the main thread happens to be: in a callback, which would
pass for the one that failed, or in code that continues after errors.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

_active: list[Deaths] = []


class Deaths:
    """The deaths of the workers of one DataLoader iterator, which `read` raises.

    Args:
        iterator: The iterator. `close` must be called when it is no longer read.
    """

    def __init__(self, iterator: Any) -> None:
        self._iterator = iterator
        self._reader: threading.Thread | None = None  # that waits for a batch
        self._error: RuntimeError | None = None
        _active.append(self)
        _install()

    def read(self, default: Any) -> Any:
        """Return the iterator's next item; `default` at its end.

        Raises:
            RuntimeError: If a worker died, now or since the last read.
        """
        self._reader = threading.current_thread()
        try:
            if (error := self._error) is not None:
                self._error = None
                raise error
            return next(self._iterator, default)
        finally:
            self._reader = None

    def close(self) -> None:
        """Leave deaths to torch's handler."""
        _active.remove(self)

    def is_meant_by(self, error: RuntimeError) -> bool:
        """Return whether torch's handler raised an error because one of these workers died."""
        pids = (worker.pid for worker in self._iterator._workers)
        return any(str(error).startswith(f"DataLoader worker (pid {pid}) ") for pid in pids)

    def take(self, error: RuntimeError) -> None:
        """Raise an error if the main thread, which handles signals, waits for a batch; else keep it for `read`."""
        if self._reader is threading.main_thread():
            raise error
        self._error = error


class _Handler:
    """A handler of SIGCHLD that calls torch's, and gives its errors to the readers.

    Args:
        before: The handler that was installed, which is torch's or calls it.
    """

    def __init__(self, before: Any) -> None:
        self._before = before

    def __call__(self, number: int, frame: FrameType | None) -> None:
        try:
            self._before(number, frame)
        except RuntimeError as error:
            deaths = next((each for each in _active if each.is_meant_by(error)), None)
            if deaths is None:
                raise
            deaths.take(error)


def _install() -> None:
    """Take over torch's handler, which it installs with the first workers that the main thread starts."""
    if hasattr(signal, "SIGCHLD") and threading.current_thread() is threading.main_thread():
        before = signal.getsignal(signal.SIGCHLD)
        if callable(before) and not isinstance(before, _Handler):
            signal.signal(signal.SIGCHLD, _Handler(before))
