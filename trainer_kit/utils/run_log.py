"""Format and reading of a run's log, `log.jsonl`."""

from __future__ import annotations

import contextlib
import errno
import io
import itertools
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from trainer_kit._version import __version__

_loads: Callable[[bytes], Any]
try:
    from orjson import loads as _loads
except ImportError:  # without the extra [report]; a third of the speed
    from json import loads as _loads

NAME = "log.jsonl"
"""Name of the log in the folder of a run."""

FORMAT = 1
"""Version of the format in "start" records; records of older logs have no version."""

FIRST = ("start", "config")
"""Events that a process writes before all others, of a training and of a hand-written loop."""

BEGINNINGS = ("start", "rollback")
"""Events after which the run continues from their step; earlier records of later steps are obsolete."""

_PIECE = 2**18
_NON_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}

Record = dict[str, Any]


class LogFile:
    """A log that is read in pieces.

    Args:
        path: The file.

    Attributes:
        path: The file.
        cut: Numbers of the truncated lines that ended processes left, as far as the file was read.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.cut: list[int] = []
        self._cut_before = 0  # number of the previous line if truncated, else 0

    def pieces(self) -> Iterator[list[Record]]:
        """Yield lists of records in file order; non-finite numbers are still strings.

        Raises:
            FileNotFoundError: If the file does not exist.
            ValueError: If a line is damaged, except one truncated by the end of its process, or has a newer format.
        """
        self.cut, self._cut_before, number = [], 0, 0
        with open(self.path, "rb") as file:
            while lines := file.readlines(_PIECE):
                records = None if self._cut_before else _parsed_together(lines)
                if records is None:
                    records = list(self._parsed_one_by_one(lines, number))
                self._check_format(records)
                yield records
                number += len(lines)

    def _parsed_one_by_one(self, lines: Sequence[bytes], before: int) -> Iterator[Record]:
        for number, line in enumerate(lines, start=before + 1):
            if not line.strip():
                continue
            record = _parsed(line)
            if self._cut_before and (record is None or record["event"] not in FIRST):
                raise ValueError(
                    f"{self.path}: line {self._cut_before} is no record of a run; repair or remove that line"
                )
            self._cut_before = 0
            if record is not None:
                yield record
            else:
                self.cut.append(number)
                self._cut_before = number

    def _check_format(self, records: Sequence[Record]) -> None:
        for record in records:
            if record["event"] == "start" and _is_newer(record.get("format", 0)):
                raise ValueError(
                    f"{self.path} has records of format {record['format']}, written by trainer_kit "
                    f"{record.get('trainer_kit')}, but trainer_kit {__version__} reads up to {FORMAT}; "
                    "install a newer trainer_kit"
                )


class LoggedWork(NamedTuple):
    """What the starts of a run logged after a checkpoint.

    Attributes:
        seconds: Their time, without the pauses between starts.
        steps: Their steps, as far as records show them.
        memberships: The "membership" records.
    """

    seconds: float
    steps: int
    memberships: list[Record]


def logged_after(path: Path, moment: float, step: int) -> LoggedWork:
    """Return what the starts of a run logged after a checkpoint.

    Args:
        path: The log; one that is missing or damaged counts as far as it can be read.
        moment: Time of the checkpoint, in seconds since 1970.
        step: Step of the checkpoint.
    """
    seconds, steps, last = 0.0, 0, moment
    begun = reached = step
    memberships = []
    with contextlib.suppress(OSError, ValueError):
        for record in itertools.chain.from_iterable(LogFile(path).pieces()):
            if (time := record.get("time", last)) <= last:
                continue
            seconds, last = seconds + time - max(last, record.get("began", last)), time
            if record["event"] in BEGINNINGS:
                steps += reached - begun if record["event"] == "start" else 0
                begun = reached = record["step"]
            reached = max(reached, record["step"])
            if record["event"] == "membership":
                memberships.append(record)
    return LoggedWork(seconds, steps + reached - begun, memberships)


def append_record(path: Path, event: str, step: int, values: Mapping[str, Any]) -> None:
    """Append a record to a log as one line, completely or not at all; create the log's folder if it is missing.

    Args:
        path: The file. The first event of a process is written on a new line if the last one is truncated.
        event: The event.
        step: Step of the record.
        values: The record; numbers of torch and numpy are written as numbers, other objects as text.

    Raises:
        OSError: If the record cannot be written.
    """
    record = {"event": event, "time": time.time(), "step": step, **values}
    line = json.dumps(_plain(record), allow_nan=False).encode() + b"\n"
    if event in FIRST and _is_cut(path):
        line = b"\n" + line
    with _opened(path) as file:
        before = file.seek(0, os.SEEK_END)
        if file.write(line) < len(line):
            file.truncate(before)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _is_cut(path: Path) -> bool:
    """Return whether the file ends in the middle of a line."""
    if not path.exists() or path.stat().st_size == 0:
        return False
    with open(path, "rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"


def _opened(path: Path) -> io.FileIO:
    try:
        return open(path, "ab", buffering=0)
    except FileNotFoundError:
        path.parent.mkdir(parents=True, exist_ok=True)
        return open(path, "ab", buffering=0)


def _plain(value: Any) -> Any:
    """Convert `value` to JSON types: numbers of numpy and torch to numbers, other objects to text."""
    if type(value) is float and math.isfinite(value):  # the usual ones first: the other checks are slow
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if hasattr(value, "tolist"):
        return _plain(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return str(float(value))
    return value if value is None or isinstance(value, (str, int, float)) else str(value)


def read_log(path: str | os.PathLike[str]) -> list[Record]:
    """Read the records of a file that `JsonLines` wrote, without those of steps repeated after a restart.

    "nan", "inf" and "-inf" become numbers. A line truncated by the end of its process is skipped.

    Args:
        path: The file.

    Returns:
        One dict per record, in file order, see `JsonLines`.

    Raises:
        FileNotFoundError: If the file does not exist.
        ValueError: If a line is damaged in another way (the message names file and line), or the records have a newer
            format.
    """
    records = [record for piece in LogFile(path).pieces() for record in piece]
    kept: list[Record] = []
    limit: float = math.inf  # smallest step from which a later start resumed
    for record in reversed(records):
        if record["step"] <= limit:
            kept.append(restored(record))
        if record["event"] in BEGINNINGS:
            limit = min(limit, record["step"])
    return kept[::-1]


def restored(value: Any) -> Any:
    """Return `value` with the strings "nan", "inf" and "-inf" as numbers, at any depth."""
    if isinstance(value, dict):
        return {name: item if type(item) is float else restored(item) for name, item in value.items()}
    if isinstance(value, list):
        return [restored(item) for item in value]
    return _NON_FINITE.get(value, value) if isinstance(value, str) else value


def _parsed_together(lines: Sequence[bytes]) -> list[Record] | None:
    """Parse and check all lines together, which is faster; return None if any line holds no record."""
    try:
        values = _loads(b"[" + b",".join(lines) + b"]")
        types = {type(value["step"]) for value in values if value["event"] is not None}
    except (KeyError, TypeError, ValueError):
        return None
    return values if len(values) == len(lines) and types == {int} else None


def _parsed(line: bytes) -> Record | None:
    """Parse the record in a line; return None if it holds none."""
    try:
        value = json.loads(line)
    except ValueError:
        return None
    is_record = isinstance(value, dict) and "event" in value and isinstance(value.get("step"), int)
    return value if is_record else None


def _is_newer(version: Any) -> bool:
    return not isinstance(version, int) or version > FORMAT
