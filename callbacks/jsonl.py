"""`JsonLines`: everything a run reports as lines of JSON, and `read_log`, which reads them."""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer_kit import __version__
from trainer_kit.callback import Callback

if TYPE_CHECKING:
    from trainer_kit.run import Run
from trainer_kit.state import TrainState

_logger = logging.getLogger("trainer_kit")
_NON_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


class JsonLines(Callback):
    """Appends one JSON object a line to a file, read back by `read_log`.

    Each line holds `event` ("start", "log", "evaluate", "predict", "save", "rollback", "end" or "exception"), `time`
    (seconds since 1970), `step`, and what belongs to the event. A line "start" heads each start and restart of the run:
    a reader must pass over earlier lines of a greater step, since the run went back; "rollback" says the same of a run
    that did so by itself. JSON has no NaN or infinity, so these are written as the strings "nan", "inf" and "-inf".
    Each line is written at once and in whole; where that fails (a full disk), a warning says so once and the run goes
    on without it.

    Args:
        path: The file; None: `log.jsonl` in `args.output_dir`.
    """

    priority = 100

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        self._path = path
        self._state: TrainState | None = None  # of the training that is written down
        self._wrote = False
        self._failed = False

    def on_train_begin(self, run: Run) -> None:
        self._state = run.state
        self._write(run, "start", trainer_kit=__version__, total_steps=run.total_steps, arguments=run.args.to_dict())

    def on_log(self, run: Run, record: dict[str, Any]) -> None:
        self._write(run, "log", **record)

    def on_evaluate(self, run: Run, metrics: dict[str, Any]) -> None:
        self._write(run, "evaluate", **metrics)

    def on_predict(self, run: Run, metrics: dict[str, Any]) -> None:
        self._write(run, "predict", **metrics)

    def on_save(self, run: Run, directory: Path) -> None:
        self._write(run, "save", step=int(directory.name.rpartition("-")[2]), directory=directory.name)

    def on_train_end(self, run: Run) -> None:
        self._write(run, "end")

    def on_rollback(self, run: Run, directory: Path) -> None:
        self._write(run, "rollback")

    def on_exception(self, run: Run, error: BaseException) -> None:
        if run.state is self._state:  # a start that was refused leaves the folder as it is
            self._write(run, "exception", type=type(error).__name__, message=str(error))

    def _write(self, run: Run, event: str, /, **values: Any) -> None:
        if not run.strategy.is_main:
            return
        path = Path(self._path) if self._path is not None else Path(run.args.output_dir) / "log.jsonl"
        record = {"event": event, "time": time.time(), "step": run.state.step, **values}
        line = json.dumps(_plain(record), allow_nan=False).encode() + b"\n"
        try:
            self._append(path, line, begins=event == "start")
        except OSError as error:
            if not self._failed:
                _logger.warning("%s could not be written to: %s; the run goes on", path, error.strerror)
            self._failed = True

    def _append(self, path: Path, line: bytes, begins: bool) -> None:
        if begins or not self._wrote:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._wrote = True
        if begins and _is_cut(path):
            line = b"\n" + line
        with open(path, "ab", buffering=0) as file:
            before = file.seek(0, os.SEEK_END)
            if file.write(line) < len(line):
                file.truncate(before)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._failed = False


def read_log(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The records of a file that `JsonLines` wrote, without those of steps that were taken again after a restart.

    "nan", "inf" and "-inf" come back as numbers. A line cut short by the end of its process is left out.

    Args:
        path: The file.

    Returns:
        One dict a line, in the order of writing, see `JsonLines`.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If a line is damaged in another way; it names the file and the line.
    """
    lines = Path(path).read_bytes().split(b"\n")
    records: list[dict[str, Any]] = []
    cut: int | None = None
    for number, line in enumerate(lines, start=1):
        if not line:
            continue
        record = _parsed(line)
        if cut is not None and (record is None or record["event"] != "start"):
            break
        cut = number if record is None else None
        if record is None:
            continue
        if record["event"] in ("start", "rollback"):
            records = [earlier for earlier in records if earlier["step"] <= record["step"]]
        records.append(record)
    if cut is not None and any(lines[cut:]):
        raise ValueError(f"{os.fspath(path)}: line {cut} is no record of a run; repair or remove that line")
    return records


def _parsed(line: bytes) -> dict[str, Any] | None:
    """The record in `line`; None where it holds none."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    if not isinstance(record, dict) or "event" not in record or not isinstance(record.get("step"), int):
        return None
    return {name: _restored(value) for name, value in record.items()}


def _restored(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _restored(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_restored(item) for item in value]
    return _NON_FINITE.get(value, value) if isinstance(value, str) else value


def _plain(value: Any) -> Any:
    """`value` in what JSON knows: numbers of numpy and torch as numbers, other objects as their text."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if hasattr(value, "tolist"):
        return _plain(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return str(float(value))
    return value if value is None or isinstance(value, (str, int, float)) else str(value)


def _is_cut(path: Path) -> bool:
    """Whether the file ends in the middle of a line."""
    if not path.exists() or path.stat().st_size == 0:
        return False
    with open(path, "rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"
