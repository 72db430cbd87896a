"""A call in a daemon thread: it may never return, and the program can end all the same."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def in_background(call: Callable[[], T], name: str) -> Future[T]:
    """Call a function in a daemon thread of its own.

    Args:
        call: The function.
        name: Name of the thread.

    Returns:
        What becomes of the call: its value or its exception.
    """
    future: Future[T] = Future()

    def target() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=target, name=name, daemon=True).start()
    return future
