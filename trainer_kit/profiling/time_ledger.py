"""`Ledger`: wall-clock time of a run by activity."""

from __future__ import annotations

import contextlib
import itertools
import operator
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from trainer_kit.profiling.memberships import MembershipHistory
from trainer_kit.profiling.trace_range import trace_range

USEFUL = ("forward", "backward", "optimizer")
"""Activities of the steps that count for the goodput."""

_UNFOLDED = 4096
"""Number of marks that triggers folding them into totals."""

LOST, DOWN, REGROUP = "lost", "down", "regroup"


class Clock(Protocol):
    """Clock of a device, such as a strategy."""

    def mark(self) -> Any:
        """Return a mark of the current time on the device, without synchronization."""

    def passed(self, marks: Sequence[Any]) -> list[float]:
        """Return the seconds from each mark to the next, up to the last one that the device has reached.

        The clock may reuse the marks before that one.

        Args:
            marks: Marks of this clock, in order.
        """


class HostClock:
    """Monotonic clock of the host, for devices that are synchronous with the host."""

    mark = staticmethod(time.perf_counter)

    def passed(self, marks: Sequence[float]) -> list[float]:
        """Return the seconds from each mark to the next."""
        return [*map(operator.sub, itertools.islice(marks, 1, None), marks)]


class Ledger:
    """Seconds of a run by activity. Each moment belongs to one activity, so that their sum is the wall-clock time.

    The activities of the loop are "setup", "data", "forward", "backward", "optimizer", "logging", "evaluation",
    "saving", "callback/NAME" for each callback, and "loop" for the rest. "backward" lasts until the optimizer begins,
    and includes the exchange of gradients. "regroup" is the time from the moment when this process began to wait for a
    lost one, or others were ready to join, to that when it continues. "lost" is work that a restart or a rollback
    discards, from the checkpoint to the run's last record, and a step that is taken again: it did not fit into memory,
    or a process was lost in it. "down" is the time from that record to the next start.

    An asynchronous device has its own clock: work of the device during an activity of the host counts once, under the
    activity in which the device received it. Data that is read while the device works therefore costs nothing. The
    training thread alone uses the ledger.

    If machines were lost, each second counts for the part of them that is left. With u the seconds of forward, backward
    and optimizer of the steps that count, p the processes in these and f those of the full size,

        goodput = sum(u * p / f) / wall        reduced = sum(seconds * (1 - p / f))

    where the sums are over the memberships, and `reduced` leaves out "down". Without a loss, p = f.

    Attributes:
        activity: Current activity.
        memberships: The machines that have trained the run.
        slowest: Seconds that this process has waited in votes for the slowest one, without those within a step.
        idle: Seconds from the last record of the earlier start to this one; 0 in a new run.
        has_joined: Whether it has taken the time of a run that this process joined.
        started: Time of this start of the run, in seconds since 1970.
    """

    def __init__(self) -> None:
        self.started = time.time()
        self.activity = "setup"
        self.memberships = MembershipHistory()
        self.slowest = self.idle = 0.0
        self.has_joined = False
        self._part = 1.0  # of the full size
        self._missing = defaultdict[str, float](float)  # seconds times the missing part, by activity
        self._settled: dict[str, float] = {}  # the seconds that `_missing` covers
        self._range: contextlib.AbstractContextManager[None] | None = None
        self._shows_ranges = self._nvtx = False
        self._seconds = defaultdict[str, float](float)
        self._room = _UNFOLDED  # marks until they are folded; 0 while ranges are shown
        # Activities and the marks of their beginnings by turns: pairs would be objects for the garbage collector.
        self._entries: list[Any] = []
        self._folded = 0  # activities that began before those in the list
        self.keep_time_by(HostClock())

    def keep_time_by(self, clock: Clock) -> None:
        """Use another clock from now on.

        Args:
            clock: Clock of the device.
        """
        first = clock.mark()  # may be slow
        if self._entries:
            self.seconds()
            self._folded += len(self._entries) // 2
        self._clock, self._mark = clock, clock.mark
        self._entries = [self.activity, first]
        self._add_entry = self._entries.extend  # bound once: the lookups take a fifth of `enter`

    def enter(self, activity: str) -> str:
        """Begin an activity.

        Args:
            activity: Name of the activity.

        Returns:
            The interrupted activity, for the caller to enter again.
        """
        before, self.activity = self.activity, activity
        self._add_entry((activity, self._mark()))
        self._room -= 1  # cheaper than len(), in a call that each step makes many times
        if self._room < 0:
            self._show_or_fold()
        return before

    @contextlib.contextmanager
    def during(self, activity: str) -> Iterator[None]:
        """Enter the context of an activity; the previous one resumes after it."""
        before = self.enter(activity)
        try:
            yield
        finally:
            self.enter(before)

    def show_ranges(self, nvtx: bool = False) -> None:
        """Show the current activity and the following ones as ranges in a profiler's trace.

        Args:
            nvtx: Whether they are ranges of NVTX too, see `trace_range`.
        """
        self._shows_ranges, self._nvtx, self._room = True, nvtx, 0
        self.enter(self.activity)

    def hide_ranges(self) -> None:
        """Show no more ranges."""
        self._shows_ranges, self._room = False, 0
        self.enter(self.activity)

    def seconds(self) -> dict[str, float]:
        """Return the seconds by activity over all starts, up to the device's progress, without synchronization."""
        self._add_entry((self.activity, self._mark()))
        self._fold()
        return dict(self._seconds)

    def wall(self) -> float:
        """Return the seconds since the run began, including the time between starts."""
        return sum(self.seconds().values())

    def missing(self) -> dict[str, float]:
        """Return the seconds times the missing part of the machines, by activity, without "down"."""
        seconds, share = self.seconds(), 1 - self._part
        if share:
            for activity, value in seconds.items():
                self._missing[activity] += share * max(0.0, value - self._settled.get(activity, 0.0))
        self._settled = seconds
        return dict(self._missing)

    def reduced(self) -> float:
        """Return the seconds times the missing part of the machines, see the class."""
        return sum(self.missing().values())

    def goodput(self) -> float:
        """Return the goodput, from 0 to 1, see the class."""
        missing, seconds = self.missing(), self.seconds()
        useful = sum(seconds.get(name, 0.0) - missing.get(name, 0.0) for name in USEFUL)
        return useful / max(sum(seconds.values()), 1e-9)

    def resize(self, since_start: bool = False) -> None:
        """Count the time from now on for the part of the machines that trains now.

        Args:
            since_start: Whether to count all time of this start so.
        """
        if not since_start:
            self.missing()
        self._part = self.memberships.part

    def state_dict(self) -> dict[str, Any]:
        state = {"seconds": self.seconds(), "time": time.time()}
        if self.memberships.entries:
            state["memberships"] = self.memberships.state_dict()
        if missing := self.missing():
            state["missing"] = missing
        return state

    def go_on(
        self, state: Mapping[str, Any], lost: float, steps: int = 0, memberships: Sequence[Mapping[str, Any]] = ()
    ) -> None:
        """Restore the ledger of a checkpoint that this start resumes from.

        Args:
            state: Result of `state_dict`.
            lost: Seconds of work after the checkpoint in earlier starts, as far as they were recorded.
            steps: Steps of that work.
            memberships: Memberships that were recorded in it.
        """
        gap = max(0.0, self.started - state["time"])
        lost = min(gap, lost)
        own = self.seconds()
        self.idle = gap - lost
        self._seconds = defaultdict(float, state["seconds"])
        for activity, seconds in ((LOST, lost), (DOWN, gap - lost)):
            self._add(activity, seconds)
        self._missing = defaultdict(float, state.get("missing", {}))
        self.memberships.go_on(state.get("memberships"), steps, memberships)
        if self.memberships.part < 1:
            self._missing[LOST] += lost * (1 - self.memberships.part)
        self._settled = dict(self._seconds)
        for activity, seconds in own.items():
            self._add(activity, seconds)

    def join(self, state: Mapping[str, Any]) -> None:
        """Take the ledger of a run that this process joins: its own time so far was not the run's.

        Args:
            state: Result of `state_dict` in a process of the run.
        """
        self.seconds()
        self._seconds = defaultdict(float, state["seconds"])
        self._missing = defaultdict(float, state.get("missing", {}))
        self._settled, self.has_joined = dict(self._seconds), True
        self.memberships.go_on(state.get("memberships"), 0, ())
        self._part, self.idle = self.memberships.part, 0.0

    def go_back(self, state: Mapping[str, Any]) -> None:
        """Count all work since a checkpoint as lost, after a rollback to it.

        Args:
            state: Result of `state_dict` in the checkpoint.
        """
        missing, now, then = self.missing(), self.seconds(), state["seconds"]
        down = now.get(DOWN, 0.0)
        lost = sum(now.values()) - down - sum(then.values()) + then.get(DOWN, 0.0)
        self._seconds = defaultdict(float, {**then, DOWN: down})
        self._add(LOST, lost)
        kept = state.get("missing", {})
        self._missing = defaultdict(float, kept)
        if (more := sum(missing.values()) - sum(kept.values())) > 0:
            self._missing[LOST] += more
        self._settled = dict(self._seconds)

    def place(self) -> int:
        """Return the number of this moment, for `lose`."""
        self.enter(self.activity)
        return self._folded + len(self._entries) // 2 - 1

    def lose(self, place: int) -> None:
        """Count all time since `place`, in this step, as lost: the step is repeated.

        Args:
            place: Result of `place`.
        """
        for number in range(2 * max(0, place - self._folded), len(self._entries), 2):
            self._entries[number] = LOST

    def enter_since(self, seconds: float, activity: str) -> None:
        """Begin an activity some seconds ago, in place of what happened since.

        A device with a clock of its own counts these seconds as they were.

        Args:
            seconds: Seconds.
            activity: Name of the activity.
        """
        begin = time.perf_counter() - seconds
        if self._mark is HostClock.mark:
            while len(self._entries) > 2 and self._entries[-1] >= begin:
                del self._entries[-2:]
            self._add_entry((activity, max(begin, self._entries[-1])))
        self.enter(activity)

    def _fold(self) -> None:
        """Add the elapsed time to the totals; keep the last mark that the device has reached."""
        passed, totals = self._clock.passed(self._entries[1::2]), self._seconds
        for activity, seconds in zip(self._entries[::2], passed, strict=False):
            totals[activity] += seconds
        del self._entries[: 2 * len(passed)]
        self._folded += len(passed)
        self._room = 0 if self._shows_ranges else max(_UNFOLDED // 16, _UNFOLDED - len(self._entries) // 2)

    def _add(self, activity: str, seconds: float) -> None:
        self._seconds[activity] += seconds

    def _show_or_fold(self) -> None:
        """Do what few entries need: show a range, or fold the marks."""
        if self._range is not None:
            self._range.__exit__(None, None, None)
            self._range = None
        if self._shows_ranges:
            self._range = trace_range(self.activity, self._nvtx)
            self._range.__enter__()
        else:
            self._fold()
