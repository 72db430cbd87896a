"""Trackers: where an Accelerator writes what it is told to log."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterable, Mapping
from numbers import Real
from pathlib import Path
from typing import Any

from trainer_kit import __version__
from trainer_kit.accelerator.options import ProjectConfiguration
from trainer_kit.accelerator.processes import Processes
from trainer_kit.strategies.base import Strategy


class TensorBoardTracker:
    """Writes numbers as scalars into event files that TensorBoard shows.

    Args:
        folder: Folder of the event files.
        options: Arguments of torch's `SummaryWriter`.
    """

    name = "tensorboard"

    def __init__(self, folder: Path, **options: Any) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.tracker = SummaryWriter(str(folder), **options)

    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        """Writes the settings of the run as text."""
        text = json.dumps(values, indent=2, default=str)
        self.tracker.add_text("config", f"```json\n{text}\n```", 0)
        self.tracker.flush()

    def log(self, values: Mapping[str, Any], step: int | None = None) -> None:
        """Writes one record."""
        for name, value in values.items():
            value = _plain(value)
            if isinstance(value, str):
                self.tracker.add_text(name, value, step)
            elif isinstance(value, Real):
                self.tracker.add_scalar(name, value, step)
            elif isinstance(value, Mapping):
                self.tracker.add_scalars(name, value, step)
        self.tracker.flush()

    def finish(self) -> None:
        """Closes the files."""
        self.tracker.close()


class JsonLinesTracker:
    """Appends records to `log.jsonl`, which `trainer_kit.callbacks.read_log` reads.

    Args:
        folder: Folder of the file.
    """

    name = "jsonl"

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.tracker = folder / "log.jsonl"

    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        """Writes the settings of the run."""
        self._write("config", 0, {"trainer_kit": __version__, "arguments": _plain(values)})

    def log(self, values: Mapping[str, Any], step: int | None = None) -> None:
        """Writes one record."""
        self._write("log", step or 0, {name: _plain(value) for name, value in values.items()})

    def finish(self) -> None:
        """Each record is written at once: nothing is left to do."""

    def _write(self, event: str, step: int, values: Mapping[str, Any]) -> None:
        line = json.dumps(_strict({"event": event, "time": time.time(), "step": step, **values}), allow_nan=False)
        with open(self.tracker, "ab", buffering=0) as file:
            file.write(line.encode() + b"\n")


class NoTracker:
    """Stands for a tracker on the processes that do not write: whatever is called does nothing."""

    def __getattr__(self, name: str) -> Any:
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self


KNOWN = {"tensorboard": TensorBoardTracker, "jsonl": JsonLinesTracker}


def chosen_trackers(log_with: Any) -> list[Any]:
    """Names and objects that `log_with` stands for.

    Raises:
        ValueError: If a name is not known.
        TypeError: If an object has no method `log`.
    """
    if log_with is None:
        return []
    chosen: list[Any] = []
    for entry in log_with if isinstance(log_with, (list, tuple)) else [log_with]:
        name = getattr(entry, "value", entry)  # an enum's
        if name == "all":
            chosen += [known for known in KNOWN if known not in chosen]
        elif isinstance(name, str) and name not in KNOWN:
            raise ValueError(
                f"log_with={name!r} is not known; use {', '.join(map(repr, KNOWN))}, 'all', or an object with "
                "log(values, step)"
            )
        elif not isinstance(name, str) and (isinstance(name, type) or not hasattr(name, "log")):
            raise TypeError(f"log_with holds {name!r}, which has no log(values, step); give a tracker's instance")
        else:
            chosen.append(name)
    return chosen


def make_trackers(
    chosen: Iterable[Any], folder: Path | None, settings: Mapping[str, Any] | None, options: Mapping[str, Any]
) -> list[Any]:
    """The trackers, with the run's settings written down.

    Raises:
        ValueError: If one writes files, but there is no folder.
    """
    trackers = []
    for entry in chosen:
        if isinstance(entry, str):
            if folder is None:
                raise ValueError(f"log_with={entry!r} writes files; give Accelerator project_dir= or logging_dir=")
            entry = KNOWN[entry](folder, **options.get(entry, {}))
        elif hasattr(entry, "start"):
            entry.start()
        if settings is not None and hasattr(entry, "store_init_configuration"):
            entry.store_init_configuration(dict(settings))
        trackers.append(entry)
    return trackers


class Tracking(Processes):
    """The part of an `Accelerator` that logs.

    Args:
        strategy: Set up.
        log_with: What is written with.
        project: Where files go.

    Attributes:
        trackers: Those that were started; none but on the main process.
        project_configuration: Where files go.

    Raises:
        ValueError: If a name in `log_with` is not known.
        TypeError: If an object in it has no method `log`.
    """

    def __init__(self, strategy: Strategy, log_with: Any, project: ProjectConfiguration) -> None:
        super().__init__(strategy)
        self.trackers: list[Any] = []
        self.project_configuration = project
        self._chosen_trackers = chosen_trackers(log_with)

    @property
    def project_dir(self) -> str | os.PathLike[str] | None:
        """Folder of the run."""
        return self.project_configuration.project_dir

    @property
    def logging_dir(self) -> str | os.PathLike[str] | None:
        """Folder of the trackers' files."""
        return self.project_configuration.logging_dir or self.project_dir

    def init_trackers(
        self,
        project_name: str,
        config: Mapping[str, Any] | None = None,
        init_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Starts what `log_with` names, on the main process.

        Args:
            project_name: Folder in `logging_dir` for the trackers that write files.
            config: Settings of the run, which are written down.
            init_kwargs: More arguments of a tracker, by its name.

        Raises:
            ValueError: If a tracker writes files, but there is no folder.
        """
        if self.is_main_process:
            folder = None if self.logging_dir is None else Path(self.logging_dir) / project_name
            self.trackers = make_trackers(self._chosen_trackers, folder, config, init_kwargs or {})

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """The tracker with this name, or with `unwrap` what it writes with; on other processes one that does nothing.

        Raises:
            ValueError: If there is none.
        """
        if not self.is_main_process:
            return NoTracker()
        for tracker in self.trackers:
            if getattr(tracker, "name", None) == name:
                return tracker.tracker if unwrap else tracker
        raise ValueError(f"no tracker is named {name!r}; name it in log_with= and call init_trackers() first")

    def log(
        self,
        values: Mapping[str, Any],
        step: int | None = None,
        log_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Gives all trackers a record, on the main process.

        Args:
            values: Numbers by name.
            step: The step that they belong to.
            log_kwargs: More arguments of a tracker's `log`, by its name.
        """
        for tracker in self.trackers:
            tracker.log(dict(values), step=step, **(log_kwargs or {}).get(getattr(tracker, "name", ""), {}))

    def end_training(self) -> None:
        """Ends the trackers; call it at the end of the run, on all processes."""
        for tracker in self.trackers:
            if hasattr(tracker, "finish"):
                tracker.finish()
        self.trackers = []
        self.strategy.teardown()


def _plain(value: Any) -> Any:
    """Numbers of torch and numpy as Python's, in mappings and lists too; other objects as their text."""
    if isinstance(value, Mapping):
        return {str(name): _plain(each) for name, each in value.items()}
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return value if value is None or isinstance(value, (str, int, float)) else str(value)


def _strict(value: Any) -> Any:
    """JSON has no NaN or infinity: they are written as strings."""
    if isinstance(value, dict):
        return {name: _strict(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_strict(each) for each in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
