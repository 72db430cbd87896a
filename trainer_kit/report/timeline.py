"""Wall-clock time of a run: the ledger's seconds, placed on the time axis."""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from trainer_kit.report import wording
from trainer_kit.report.history import CALLBACK, SECONDS, Array, RunHistory
from trainer_kit.report.panels import Table
from trainer_kit.utils.units import format_duration, join_names

USEFUL = ("forward", "backward", "optimizer")
LOST, DOWN, REGROUP, UNKNOWN = "lost", "down", "regroup", "not recorded"

SHOWN = (
    *USEFUL, "data", "evaluation", "saving", "logging and callbacks", "setup", "loop", UNKNOWN, LOST, DOWN,
)  # fmt: skip
"""Activities that the timeline distinguishes, from bottom to top."""

_KINDS = {"rollback": "rollback", "start": "restart"}
_DESCRIBED = 5


@dataclasses.dataclass(frozen=True)
class Mark:
    """A moment at which the run resumed from an earlier step.

    Attributes:
        second: Seconds from the beginning of the run.
        kind: "restart" or "rollback".
        step: Step that the run resumed from.
    """

    second: float
    kind: str
    step: int


@dataclasses.dataclass(frozen=True)
class _Spans:
    """Consecutive time spans, each divided evenly among several activities.

    Attributes:
        begins: Beginnings in seconds since 1970, [spans].
        ends: Ends in seconds since 1970, [spans].
        seconds: Seconds of each activity in each span, [spans].
    """

    begins: Array
    ends: Array
    seconds: dict[str, Array]

    def with_more(self, spans: list[tuple[float, float, dict[str, float]]]) -> _Spans:
        """Return these and more spans, in order."""
        begins = np.concatenate([self.begins, [begin for begin, _, _ in spans]])
        ends = np.concatenate([self.ends, [end for _, end, _ in spans]])
        order = np.argsort(begins, kind="stable")
        names = dict.fromkeys([*self.seconds, *(name for _, _, seconds in spans for name in seconds)])
        nothing = np.zeros(len(self.begins))
        seconds = {
            name: np.concatenate([self.seconds.get(name, nothing), [each.get(name, 0.0) for _, _, each in spans]])[
                order
            ]
            for name in names
        }
        return _Spans(begins[order], ends[order], seconds)


class Timeline:
    """Wall-clock time of a run, from its first record to its last.

    Args:
        history: History of a run for which `Timeline.exists`.

    Attributes:
        totals: Seconds by activity, as the ledger names them, including "lost" and "down".
        marks: Restarts and rollbacks.
        length: Seconds from the beginning of the run to its last record.
    """

    def __init__(self, history: RunHistory) -> None:
        spans = _record_spans(history)
        self._spans = spans.with_more(_other_spans(history, spans))
        self._origin = float(self._spans.begins[0])
        self.length = max(history.ends[-1] - self._origin, 1e-9)
        self.totals = _ledger(history.summary) or {
            name: float(seconds.sum()) for name, seconds in self._spans.seconds.items() if seconds.any()
        }
        self.marks = [
            Mark(event.began - self._origin, _KINDS[event.name], event.step)
            for event in history.events
            if event.name in _KINDS and event is not history.starts[0]
        ]

    @staticmethod
    def exists(history: RunHistory) -> bool:
        """Return whether the log holds the necessary data: starts, times and the ledger's seconds."""
        if not history.starts or not any(name.startswith(SECONDS) for name in history.names):
            return False
        times = [*(event.time for event in history.starts), *history.ends]
        return bool(np.isfinite(times).all() and np.isfinite(history.column("time")).all())

    @property
    def wall(self) -> float:
        """Total seconds."""
        return sum(self.totals.values())

    @property
    def goodput(self) -> float:
        """Share of forward, backward and optimizer in the wall-clock time."""
        return sum(self.totals.get(name, 0.0) for name in USEFUL) / max(self.wall, 1e-9)

    def shares(self, columns: int) -> tuple[Array, dict[str, Array]]:
        """Return the edges of equal parts of the time in seconds, [columns + 1], and each activity's share, [columns].

        Args:
            columns: Number of parts.
        """
        edges = np.linspace(0.0, self.length, columns + 1)
        moments = np.stack([self._spans.begins, self._spans.ends], axis=1).ravel() - self._origin
        moments, shares = np.maximum.accumulate(moments), {}
        for name in SHOWN:
            parts = [seconds for activity, seconds in self._spans.seconds.items() if _shown(activity) == name]
            if parts:
                seconds = np.sum(parts, axis=0)
                passed = np.cumsum(seconds)
                cumulated = np.stack([passed - seconds, passed], axis=1).ravel()
                shares[name] = np.diff(np.interp(edges, moments, cumulated)) * (columns / self.length)
        return edges, {name: share for name, share in shares.items() if share.max(initial=0.0) > 1e-3}

    def shown_totals(self) -> dict[str, float]:
        """Return the shares of the distinguished activities, in order; 0 for one that is drawn without a total."""
        totals = dict.fromkeys(SHOWN, 0.0)
        for activity, seconds in self.totals.items():
            totals[_shown(activity)] += seconds / self.wall
        drawn = {_shown(name) for name, seconds in self._spans.seconds.items() if seconds.sum() > 1e-3 * self.length}
        return {name: share for name, share in totals.items() if share > 0 or name in drawn}

    def table(self) -> Table:
        """Return the totals as a table, longest first."""
        ordered = sorted(self.totals.items(), key=lambda item: -item[1])
        rows = [[name, format_duration(value), wording.percent(value / self.wall)] for name, value in ordered]
        return Table(["Activity", "Time", "Share"], rows, len(rows))

    def description(self) -> str:
        """Describe the plot in sentences, as its text alternative."""
        longest = sorted(self.totals.items(), key=lambda item: -item[1])[:4]
        parts = join_names(f"{name} {wording.percent(value / self.wall)}" for name, value in longest)
        sentences = [f"Wall time of {format_duration(self.wall)}, most of it on {parts}."]
        for mark in self.marks[:_DESCRIBED]:
            sentences.append(
                f"A {mark.kind} {format_duration(mark.second)} after the beginning, resuming from step {mark.step:,}."
            )
        if len(self.marks) > _DESCRIBED:
            sentences.append(f"And {len(self.marks) - _DESCRIBED:,} more of them.")
        return " ".join(sentences)


def _record_spans(history: RunHistory) -> _Spans:
    """Return the time between regular records, divided among their activities."""
    names = [name for name in history.names if name.startswith(SECONDS) and _passes(name)]
    seconds = {name.removeprefix(SECONDS): np.nan_to_num(history.column(name)) for name in names}
    ends = np.maximum.accumulate(history.column("time"))
    recorded = np.sum([*seconds.values()], axis=0) if seconds else np.zeros(len(ends))
    begins = np.concatenate([[-math.inf], ends])[:-1]
    firsts = np.searchsorted(history.places, [event.place for event in history.starts])
    for start, first in zip(history.starts, firsts, strict=True):
        if first < len(ends):
            begins[first] = min(start.time, ends[first])  # earlier time belongs to no record
    begins = np.where(np.isfinite(begins), begins, ends)
    room = ends - begins
    scale = np.where(history.kept, np.minimum(1.0, room / np.maximum(recorded, 1e-9)), 0.0)
    seconds = {name: values * scale for name, values in seconds.items()}
    seconds[UNKNOWN] = np.where(history.kept, room - recorded * scale, 0.0)
    seconds[LOST] = np.where(history.kept, 0.0, room)  # time of repeated steps
    return _Spans(begins, ends, seconds)


def _other_spans(history: RunHistory, spans: _Spans) -> list[tuple[float, float, dict[str, float]]]:
    """Return the time outside regular records: each start's setup, its end, and the time between starts."""
    found: list[tuple[float, float, dict[str, float]]] = []
    firsts = np.searchsorted(history.places, [*(event.place for event in history.starts), history.count])
    end_before = -math.inf
    for number, (start, end) in enumerate(zip(history.starts, history.ends, strict=True)):
        began = min(max(start.began, end_before), start.time)
        if number:
            found.append((end_before, began, {DOWN: max(0.0, began - end_before)}))
        found.append((began, start.time, {"setup": start.time - began}))
        first, after = firsts[number : number + 2]
        last = float(spans.ends[after - 1]) if after > first else start.time
        room = max(0.0, end - last)
        is_last = number + 1 == len(history.starts)
        found.append((last, end, _rest(history, spans, room) if is_last else {LOST: room}))
        end_before = end
    return found


def _rest(history: RunHistory, spans: _Spans, room: float) -> dict[str, float]:
    """Divide the time after the last regular record by the difference of the summary and the records."""
    totals = {name: total for name, total in _ledger(history.summary).items() if _passes(name) and name != "setup"}
    recorded = {name: float(seconds.sum()) for name, seconds in spans.seconds.items()}
    more = {name: max(0.0, total - recorded.get(name, 0.0)) for name, total in totals.items()}
    scale = min(1.0, room / max(sum(more.values()), 1e-9))
    rest = {name: seconds * scale for name, seconds in more.items()}
    return {**rest, UNKNOWN: room - sum(rest.values())}


def _ledger(record: dict[str, object]) -> dict[str, float]:
    """Return the seconds by activity in a record."""
    return {
        name.removeprefix(SECONDS): float(value)
        for name, value in record.items()
        if name.startswith(SECONDS) and isinstance(value, (int, float)) and value > 0
    }


def _passes(name: str) -> bool:
    """Return whether an activity takes place between two records, not between two starts."""
    return name.removeprefix(SECONDS) not in (LOST, DOWN)


def _shown(activity: str) -> str:
    """Return the timeline's name for an activity."""
    if activity.startswith(CALLBACK) or activity == "logging":
        return "logging and callbacks"
    return activity if activity in SHOWN else "loop"
