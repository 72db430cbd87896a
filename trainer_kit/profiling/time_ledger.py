"""`Ledger`: where the wall time of a run goes."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch

_UNFOLDED = 4096
"""Marks after which they are folded into totals though nobody asks for them."""

LOST, DOWN = "lost", "down"


class Clock(Protocol):
    """What tells the time of a device, as a strategy does."""

    def mark(self) -> Any:
        """The present moment on the device, without waiting for it."""

    def passed(self, marks: Sequence[Any]) -> list[float]:
        """Seconds from each mark to the next one, up to the last that the device has come to.

        The marks before that one are done with: the clock may use them for other moments.
        """


class HostClock:
    """The host's monotonic clock, for devices that work at the host's pace."""

    mark = staticmethod(time.perf_counter)

    def passed(self, marks: Sequence[float]) -> list[float]:
        """Seconds from each mark to the next one."""
        return [after - before for before, after in itertools.pairwise(marks)]


class Ledger:
    """The seconds of a run by activity: at each moment it is in one, so that they add up to the wall time.

    The activities of the loop are "setup", "data", "forward", "backward", "optimizer", "logging", "evaluation",
    "saving", "callback/NAME" for each callback, and "loop" for the rest. "lost" is work that a restart or a rollback
    did away with, from the checkpoint to the run's last sign of life, and a step that did not fit into memory. "down"
    is the time from that sign of life to the next start.

    A device that works behind the host has a clock of its own: what it does while the host does something else is
    counted once, as what the device was given then. So data that is read in the shadow of the device costs nothing.
    It is kept and read by the thread that trains.

    Attributes:
        activity: The present one.
        annotate: Whether each activity is a range in a profiler's trace too.
        started: When this start of the run began, in seconds since 1970.
    """

    def __init__(self) -> None:
        self.annotate = False
        self.started = time.time()
        self.activity = "setup"
        self._range: torch.profiler.record_function | None = None
        self._seconds: dict[str, float] = {}
        self._entries: list[tuple[str, Any]] = []  # activities and the marks at which they began
        self.keep_time_by(HostClock())

    def keep_time_by(self, clock: Clock) -> None:
        """Takes the time from another clock from now on."""
        first = clock.mark()  # may take its time
        if self._entries:
            self.seconds()
        self._clock, self._mark = clock, clock.mark
        self._entries = [(self.activity, first)]

    def enter(self, activity: str) -> str:
        """Begins an activity and returns the one that it interrupts, to be entered again."""
        before, self.activity = self.activity, activity
        self._entries.append((activity, self._mark()))
        if self.annotate or self._range is not None:
            self._annotate(activity)
        if len(self._entries) > _UNFOLDED:
            self._fold()
        return before

    @contextlib.contextmanager
    def during(self, activity: str) -> Iterator[None]:
        """The context of an activity, after which the one before goes on."""
        before = self.enter(activity)
        try:
            yield
        finally:
            self.enter(before)

    def seconds(self) -> dict[str, float]:
        """Seconds by activity, over all starts of the run, as far as the device has come; nobody waits for it."""
        self._entries.append((self.activity, self._mark()))
        self._fold()
        return dict(self._seconds)

    def wall(self) -> float:
        """Seconds since the run began, times in which it was down included."""
        return sum(self.seconds().values())

    def state_dict(self) -> dict[str, Any]:
        return {"seconds": self.seconds(), "time": time.time()}

    def go_on(self, state: Mapping[str, Any], lost: float) -> None:
        """Takes up the ledger of a checkpoint that this start goes on from.

        Args:
            state: What `state_dict` gave.
            lost: Seconds of work that earlier starts did after the checkpoint, as far as they told of it.
        """
        gap = max(0.0, self.started - state["time"])
        lost = min(gap, lost)
        own = self.seconds()
        self._seconds = dict(state["seconds"])
        for activity, seconds in (*own.items(), (LOST, lost), (DOWN, gap - lost)):
            self._add(activity, seconds)

    def go_back(self, state: Mapping[str, Any]) -> None:
        """Counts all work since a checkpoint as lost: the run goes on from there."""
        now, then = self.seconds(), state["seconds"]
        down = now.get(DOWN, 0.0)
        lost = sum(now.values()) - down - sum(then.values()) + then.get(DOWN, 0.0)
        self._seconds = {**then, DOWN: down}
        self._add(LOST, lost)

    def place(self) -> object:
        """This moment, for `lose`."""
        self.enter(self.activity)
        return self._entries[-1]

    def lose(self, place: object) -> None:
        """Counts all since `place`, in this step, as lost: it is done again."""
        for number in reversed(range(len(self._entries))):
            entry = self._entries[number]
            self._entries[number] = (LOST, entry[1])
            if entry is place:
                break

    def _fold(self) -> None:
        """Adds up what has passed; of the marks the last that the device has come to stays."""
        passed, totals = self._clock.passed([mark for _, mark in self._entries]), self._seconds
        for (activity, _), seconds in zip(self._entries, passed, strict=False):
            totals[activity] = totals.get(activity, 0.0) + seconds
        del self._entries[: len(passed)]

    def _add(self, activity: str, seconds: float) -> None:
        self._seconds[activity] = self._seconds.get(activity, 0.0) + seconds

    def _annotate(self, activity: str) -> None:
        if self._range is not None:
            self._range.__exit__(None, None, None)
            self._range = None
        if self.annotate:
            self._range = torch.profiler.record_function(activity)
            self._range.__enter__()
