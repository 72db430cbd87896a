"""`RunHistory`: a run's log in columns, so that 100,000 records load in about a second."""

from __future__ import annotations

import functools
import itertools
import math
import os
from collections.abc import Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from trainer_kit.utils.run_log import BEGINNINGS, NAME, LogFile, Record, restored

Array = npt.NDArray[np.float64]
Places = npt.NDArray[np.int64]

SECONDS = "seconds/"
ANATOMY = "anatomy/"
CALLBACK = "callback/"


class LoggedEvent(NamedTuple):
    """A record other than the regular "log" ones.

    Attributes:
        place: Index of the record in the log, from 0.
        record: The record as `read_log` returns it.
    """

    place: int
    record: Record

    @property
    def name(self) -> str:
        return str(self.record["event"])

    @property
    def step(self) -> int:
        return int(self.record["step"])

    @property
    def time(self) -> float:
        time = self.record.get("time")
        return float(time) if isinstance(time, (int, float)) else math.nan

    @property
    def began(self) -> float:
        """Time at which a start's setup began; for other events, their own time."""
        began = self.record.get("began")
        return float(began) if isinstance(began, (int, float)) and math.isfinite(began) else self.time


class Best(NamedTuple):
    """The best evaluation: the name of its metric, its step and the value."""

    name: str
    step: int
    value: float


class _Block(NamedTuple):
    """Regular records of one piece of the log that hold the same names, one row each."""

    places: Places
    names: dict[str, int]
    values: Array


class RunHistory:
    """History of a run from its log.

    Args:
        folder: The run's `output_dir`, or the log itself.

    Attributes:
        name: Name of the folder.
        path: Path of the log.
        cut: Numbers of incomplete lines, where the process ended during a write; they are skipped.
        count: Number of records in the log.
        events: All records but the regular "log" ones, in the order of writing.
        places: Indices of the regular records in the log.

    Raises:
        FileNotFoundError: If there is no log.
        ValueError: If the log holds no records, or cannot be read, see `LogFile`.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.path = Path(folder) if Path(folder).is_file() else Path(folder) / NAME
        if not self.path.exists():
            what = f"has no {NAME}" if Path(folder).is_dir() else "does not exist"
            raise FileNotFoundError(
                f"{os.fspath(folder)} {what}; give the output_dir of a run that had 'jsonl' in report_to"
            )
        self.name = self.path.resolve().parent.name
        self.events: list[LoggedEvent] = []
        self.count = 0
        self._blocks: list[_Block] = []
        self._columns: dict[str, Array] = {}
        log = LogFile(self.path)
        for piece in log.pieces():
            self._add(piece)
        self.cut = log.cut
        if not self.count:
            raise ValueError(f"{self.path} holds no records; give the output_dir of a run that has begun")
        self.places = np.concatenate([np.empty(0, np.int64), *(block.places for block in self._blocks)])
        self._order = np.argsort(self.places, kind="stable")
        self.places = self.places[self._order]

    def _add(self, piece: Sequence[Record]) -> None:
        rows: dict[tuple[str, ...], list[int]] = {}
        for place, record in enumerate(piece):
            if record["event"] == "log" and "train_runtime" not in record:
                rows.setdefault(tuple(record), []).append(place)
            else:
                self.events.append(LoggedEvent(self.count + place, restored(record)))
        for keys, places in rows.items():
            names = [name for name in keys if name != "event"]
            records = [piece[place] for place in places]
            values = _numbers(records, names).reshape(len(records), len(names))
            columns = {name: number for number, name in enumerate(names)}
            self._blocks.append(_Block(np.asarray(places, np.int64) + self.count, columns, values))
        self.count += len(piece)

    @functools.cached_property
    def names(self) -> list[str]:
        """All names of the regular records, in the order of their first appearance."""
        return list(dict.fromkeys(itertools.chain.from_iterable(block.names for block in self._blocks)))

    def column(self, name: str) -> Array:
        """Return the values of `name` in the regular records, [records], including repeated steps; NaN where missing.

        Args:
            name: Name in the records.
        """
        if name not in self._columns:
            parts = [
                block.values[:, block.names[name]] if name in block.names else np.full(len(block.places), math.nan)
                for block in self._blocks
            ]
            self._columns[name] = np.concatenate([np.empty(0), *parts])[self._order]
        return self._columns[name]

    @functools.cached_property
    def kept(self) -> npt.NDArray[np.bool_]:
        """Mask of the valid regular records, [records]: False for steps that were repeated later."""
        return self._stand(self.places, self.column("step"))

    @functools.cached_property
    def story(self) -> list[LoggedEvent]:
        """Events that are valid."""
        places = np.array([event.place for event in self.events], np.int64)
        stand = self._stand(places, np.array([event.step for event in self.events], np.float64))
        return [event for event, stands in zip(self.events, stand, strict=True) if stands]

    def _stand(self, places: Places, steps: Array) -> npt.NDArray[np.bool_]:
        """Return which records are valid: no later record resumes the run before their steps."""
        beginnings = [event for event in self.events if event.name in BEGINNINGS]
        least = np.minimum.accumulate([math.inf, *(float(event.step) for event in reversed(beginnings))])[::-1]
        later = np.searchsorted([event.place for event in beginnings], places, side="right")
        return np.asarray(steps <= least[later], np.bool_)

    def curve(self, name: str) -> tuple[Array, Array]:
        """Return steps, ascending, and values of `name` in the valid records that hold it, including NaN and infinity.

        Args:
            name: Name in the records.
        """
        lengths = [len(block.places) for block in self._blocks]
        there = np.repeat(np.array([name in block.names for block in self._blocks], np.bool_), lengths)[self._order]
        chosen = there & self.kept
        steps, values = self.column("step")[chosen], self.column(name)[chosen]
        if (np.diff(steps) < 0).any():  # a log of another program
            order = np.argsort(steps, kind="stable")
            return steps[order], values[order]
        return steps, values

    @functools.cached_property
    def evaluations(self) -> list[Record]:
        """Records of the valid evaluations."""
        return [event.record for event in self.story if event.name == "evaluate"]

    @functools.cached_property
    def judged(self) -> list[Record]:
        """Records of the valid evaluations by which the training judged its model, those within it after a step."""
        is_training, found = False, []
        for event in self.story:
            if event.name in ("start", "end", "exception"):
                is_training = event.name == "start"
            elif event.name == "evaluate" and is_training and event.step:
                found.append(event.record)
        return found

    @functools.cached_property
    def best(self) -> Best | None:
        """Best evaluation by `metric_for_best_model`, the first among equals; None if none is known."""
        arguments = self.arguments
        name = arguments.get("metric_for_best_model") or "eval_loss"
        last = [event for event in self.story if event.name in ("start", "end")][-1:]
        if last and "best_step" in last[0].record:
            return Best(name, last[0].record["best_step"], last[0].record["best_metric"])
        values: dict[int, float] = {}
        for record in self.judged or self.evaluations:
            value = record.get(name, record.get(name.removeprefix("eval_")))  # a callback may leave out the prefix
            if value is not None and is_finite(value):
                values.setdefault(record["step"], float(value))
        if not values:
            return None
        step = (max if arguments.get("greater_is_better") else min)(values, key=lambda step: values[step])
        return Best(name, step, float(values[step]))

    @functools.cached_property
    def summary(self) -> Record:
        """Last record of the run, with its overall figures; empty if the run did not complete."""
        records = [event.record for event in self.story if event.name == "log"]
        return records[-1] if records else {}

    @functools.cached_property
    def beginning(self) -> Record:
        """Newest record with the arguments; empty if there is none."""
        records = [event.record for event in self.events if isinstance(event.record.get("arguments"), dict)]
        return records[-1] if records else {}

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments of the newest start."""
        return dict(self.beginning.get("arguments", {}))

    @functools.cached_property
    def step(self) -> int:
        """Last step of the run."""
        steps = [event.step for event in self.story]
        logged = self.column("step")[self.kept]
        return max([0, *steps, *(int(step) for step in logged[-1:])])

    @functools.cached_property
    def starts(self) -> list[LoggedEvent]:
        """All "start" records."""
        return [event for event in self.events if event.name == "start"]

    @functools.cached_property
    def ends(self) -> list[float]:
        """Time of each start's end, or of its last record without an end, in seconds since 1970."""
        times = np.full(self.count, -math.inf)
        times[self.places] = self.column("time")
        for event in self.events:
            times[event.place] = event.time
        for event in self.events:  # predictions may follow
            if event.name in ("end", "exception"):
                after = next((start.place for start in self.starts if start.place > event.place), self.count)
                times[event.place + 1 : after] = -math.inf
        begins = [event.place for event in self.starts]
        return [
            float(np.fmax.reduce(times[first:last], initial=-math.inf))
            for first, last in itertools.pairwise([*begins, self.count])
        ]


def is_finite(value: Any) -> bool:
    """Return whether the value is a number that can be drawn."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _numbers(records: Sequence[Record], names: Sequence[str]) -> Array:
    """Return the records' values, one record after the other; NaN for values that are no numbers."""
    size = len(records) * len(names)
    flat = map(itemgetter(*names), records) if len(names) > 1 else ((record[names[0]],) for record in records)
    try:
        return np.fromiter(itertools.chain.from_iterable(flat), np.float64, size)
    except (OverflowError, TypeError, ValueError):  # a name, a list, a null
        return np.array([_number(record[name]) for record in records for name in names], np.float64)


def _number(value: Any) -> float:
    try:
        return float(value)
    except (OverflowError, TypeError, ValueError):
        return math.nan
