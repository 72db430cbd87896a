"""Threads in the simulation: each has the modes, and knows what those that it heard from have waited for."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from kit.fake_cuda.clocks import Clock
from kit.fake_cuda.gpus import Gpus


def replace_threads(
    gpus: Gpus, modes: Callable[[], contextlib.AbstractContextManager[Any]], patches: pytest.MonkeyPatch
) -> None:
    """Replace what starts threads, and by which they wait for one another.

    Args:
        gpus: The simulated devices.
        modes: Returns the context in which a thread runs.
        patches: Takes the replacements.
    """
    _replace_start(gpus, modes, patches)
    _replace_conditions(gpus, patches)


def _replace_start(gpus: Gpus, modes: Any, patches: pytest.MonkeyPatch) -> None:
    start, join, submit = threading.Thread.start, threading.Thread.join, ThreadPoolExecutor.submit

    def started(self: Any) -> None:
        run, self.clock = self.run, Clock(gpus.host)

        def with_modes() -> None:
            with modes():
                gpus.host.join(self.clock)
                try:
                    run()
                finally:
                    self.clock = Clock(gpus.host)

        self.run = with_modes
        start(self)

    def joined(self: Any, timeout: float | None = None) -> None:
        join(self, timeout)
        if not self.is_alive():
            gpus.host.join(getattr(self, "clock", Clock()))

    def submitted(self: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        clock = Clock(gpus.host)

        def informed(*args: Any, **kwargs: Any) -> Any:
            gpus.host.join(clock)
            return function(*args, **kwargs)

        return submit(self, informed, *args, **kwargs)

    patches.setattr(threading.Thread, "start", started)
    patches.setattr(threading.Thread, "join", joined)
    patches.setattr(ThreadPoolExecutor, "submit", submitted)


def _replace_conditions(gpus: Gpus, patches: pytest.MonkeyPatch) -> None:
    """Conditions are what events, queues and futures are made of; several may share a lock."""
    clocks: weakref.WeakKeyDictionary[Any, Clock] = weakref.WeakKeyDictionary()
    condition, event = threading.Condition, threading.Event
    enter, leave, wait, is_set = condition.__enter__, condition.__exit__, condition.wait, event.is_set

    def tell(lock: Any) -> None:
        clocks.setdefault(lock, Clock()).join(gpus.host)

    def hear(lock: Any) -> None:
        gpus.host.join(clocks.get(lock, Clock()))

    def entered(self: Any) -> Any:
        result = enter(self)
        hear(self._lock)
        return result

    def left(self: Any, *args: Any) -> Any:
        tell(self._lock)
        return leave(self, *args)

    def waited(self: Any, timeout: float | None = None) -> bool:
        tell(self._lock)
        result = wait(self, timeout)
        hear(self._lock)
        return result

    def seen(self: Any) -> bool:
        result = is_set(self)
        if result:
            hear(self._cond._lock)
        return result

    patches.setattr(condition, "__enter__", entered)
    patches.setattr(condition, "__exit__", left)
    patches.setattr(condition, "wait", waited)
    patches.setattr(event, "is_set", seen)
