"""`MachineBand`: the machines that trained a run, over its wall-clock time."""

from __future__ import annotations

import math
from typing import NamedTuple

from trainer_kit.profiling.memberships import MembershipEntry
from trainer_kit.report import wording
from trainer_kit.report.history import LoggedEvent, RunHistory
from trainer_kit.report.panels import Table
from trainer_kit.utils.units import format_count, format_duration, join_names

TRAINING, MISSING, STILL = "training", "missing", "standing still"

_DESCRIBED = 5
_ROWS = 50


class Span(NamedTuple):
    """A time in which the same machines were there.

    Attributes:
        begin: Seconds from the beginning of the run.
        end: Seconds from the beginning of the run.
        present: Number of machines, or of processes; 0 while none trained.
    """

    begin: float
    end: float
    present: int


class Change(NamedTuple):
    """A change of the machines.

    Attributes:
        second: Seconds from the beginning of the run.
        step: Step from which the new ones train.
        entry: The membership.
    """

    second: float
    step: int
    entry: MembershipEntry


class MachineBand:
    """The machines that trained a run over its wall-clock time; its processes if the machines are always as many.

    Args:
        history: History of a run for which `MachineBand.exists`.

    Attributes:
        noun: "machine" or "process".
        spans: Times with the same machines, in order and without gaps.
        changes: The changes, in order.
        full: Largest number of them.
        length: Seconds from the beginning of the run to its last record.
    """

    def __init__(self, history: RunHistory) -> None:
        first = history.starts[0]
        self._origin = first.began
        self.length = max(history.ends[-1] - self._origin, 1e-9)
        self.changes = [
            Change(event.time - self._origin, event.step, MembershipEntry.from_dict(event.record))
            for event in _changes(history)
        ]
        sizes = {self.changes[0].entry.machines_before, *(change.entry.machines for change in self.changes)}
        self.noun = "machine" if len(sizes) > 1 or any(each.entry.lost for each in self.changes) else "process"
        self.spans = self._spans(history)
        self.full = max(1, *(span.present for span in self.spans))

    @staticmethod
    def exists(history: RunHistory) -> bool:
        """Return whether the machines or processes of the run have changed, as the log shows it."""
        times = [*(event.time for event in history.starts), *history.ends, *(each.time for each in _changes(history))]
        return bool(history.starts and _changes(history)) and all(map(math.isfinite, times))

    def _spans(self, history: RunHistory) -> list[Span]:
        """Return the spans of all starts, each cut by the changes in it, with what lies between them."""
        count, at, spans = self._count(self.changes[0].entry, before=True), 0.0, list[Span]()
        for start, end in zip(history.starts, history.ends, strict=True):
            begin = max(at, start.began - self._origin)
            spans.append(Span(at, begin, 0))
            at, end = begin, max(begin, end - self._origin)
            for change in self.changes:
                if not begin <= change.second <= end:
                    continue
                # New processes begin with the change; those that stay have stood still before it.
                paused = max(at, change.second - change.entry.pause) if change.entry.in_process else at
                spans += [Span(at, paused, count)]
                count = self._count(change.entry)
                if change.entry.in_process:
                    spans.append(Span(paused, change.second, 0))
                    at = change.second
            spans.append(Span(at, end, count))
            at = end
        return [span for span in spans if span.end > span.begin]

    def _count(self, entry: MembershipEntry, before: bool = False) -> int:
        name = "machines" if self.noun == "machine" else "processes"
        return int(getattr(entry, f"{name}_before" if before else name))

    @property
    def title(self) -> str:
        """Title of the plot."""
        return "Machines over time" if self.noun == "machine" else "Processes over time"

    @property
    def kinds(self) -> list[str]:
        """What is to be seen in the plot."""
        there = {
            TRAINING: any(span.present for span in self.spans),
            MISSING: any(0 < span.present < self.full for span in self.spans),
            STILL: any(span.present == 0 for span in self.spans),
        }
        return [kind for kind, is_there in there.items() if is_there]

    @property
    def missing(self) -> float:
        """Missing part of the machines times the time in which the others trained, as a share of the whole time."""
        lost = sum((span.end - span.begin) * (1 - span.present / self.full) for span in self.spans if span.present)
        return lost / self.length

    def table(self) -> Table:
        """Return the changes as a table."""
        nouns = ["Machines", "Processes", "Change", "Pause", "Steps again", "Cause"]
        rows = [
            [
                f"{change.entry.number:,}", format_duration(change.second), f"{change.step:,}",
                f"{change.entry.machines:,}", f"{change.entry.processes:,}", _what(change.entry) or "-",
                format_duration(change.entry.pause), f"{change.entry.again:,}", change.entry.cause or "-",
            ]
            for change in self.changes
        ]  # fmt: skip
        return Table(["Membership", "At", "From step", *nouns], rows[:_ROWS], len(rows))

    def description(self) -> str:
        """Describe the plot in sentences, as its text alternative."""
        first = format_count(self._count(self.changes[0].entry, before=True), self.noun)
        sentences = [f"{first} at first."]
        for change in self.changes[:_DESCRIBED]:
            what = _what(change.entry)
            sentences.append(
                f"{format_duration(change.second)} after the beginning, from step {change.step:,} on: "
                f"{format_count(self._count(change.entry), self.noun)}{f', {what}' if what else ''}."
            )
        if len(self.changes) > _DESCRIBED:
            sentences.append(f"And {len(self.changes) - _DESCRIBED:,} more changes.")
        sentences.append(f"{wording.percent(self.missing)} of their time is missing.")
        return " ".join(sentences)


def _changes(history: RunHistory) -> list[LoggedEvent]:
    return [event for event in history.events if event.name == "membership"]


def _what(entry: MembershipEntry) -> str:
    parts = [(entry.lost, "lost"), (entry.joined, "joined")]
    return ", ".join(f"{join_names(hosts)} {verb}" for hosts, verb in parts if hosts)
