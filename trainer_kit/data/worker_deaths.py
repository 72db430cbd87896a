"""`WorkerDeaths`: raises the death of a data worker where its batch is read.

torch raises it in its handler of SIGCHLD, and so wherever the main thread happens to be: in a callback, which would
pass for the one that failed, or in code that continues after errors.
"""

from __future__ import annotations

import signal
import threading
import weakref
from types import FrameType
from typing import Any


class WorkerDeaths:
    """The deaths of the workers of one DataLoader iterator, which `read` raises.

    Args:
        iterator: The iterator.
    """

    def __init__(self, iterator: Any) -> None:
        self._starts = tuple(f"DataLoader worker (pid {worker.pid}) " for worker in iterator._workers)
        self._reader: threading.Thread | None = None  # that waits for a batch
        self._error = ""

    @staticmethod
    def of(iterator: Any) -> WorkerDeaths:
        """Return the deaths of an iterator, which several passes read where its workers persist."""
        _install()
        return _all.setdefault(iterator, WorkerDeaths(iterator))

    def read(self, iterator: Any, default: Any) -> Any:
        """Return the next item of the iterator; `default` at its end.

        Raises:
            RuntimeError: If a worker died, now or since the last read.
        """
        self._reader = threading.current_thread()
        try:
            if error := self._error:
                self._error = ""
                raise RuntimeError(error)
            return next(iterator, default)
        finally:
            self._reader = None

    def concern(self, error: str) -> bool:
        """Return whether torch's handler means one of these workers."""
        return error.startswith(self._starts)

    def keep(self, error: str) -> bool:
        """Keep an error for `read`; return False if the main thread, which handles signals, waits in it already."""
        if self._reader is threading.main_thread():
            return False
        self._error = error
        return True


_all: weakref.WeakKeyDictionary[Any, WorkerDeaths] = weakref.WeakKeyDictionary()


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
            deaths = next((each for each in _all.values() if each.concern(str(error))), None)
            if deaths is None or not deaths.keep(str(error)):
                raise


def _install() -> None:
    """Take over torch's handler, which it installs with the first workers that the main thread starts."""
    if hasattr(signal, "SIGCHLD") and threading.current_thread() is threading.main_thread():
        before = signal.getsignal(signal.SIGCHLD)
        if callable(before) and not isinstance(before, _Handler):
            signal.signal(signal.SIGCHLD, _Handler(before))
