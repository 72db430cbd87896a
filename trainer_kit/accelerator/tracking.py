"""Trackers, which write the records that an Accelerator logs."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from numbers import Real
from pathlib import Path
from typing import Any

from trainer_kit._version import __version__
from trainer_kit.accelerator.process_info import ProcessInfo
from trainer_kit.accelerator.utils.dataclasses import GradientAccumulationPlugin, ProjectConfiguration
from trainer_kit.strategies.base import Strategy
from trainer_kit.strategies.scalars import as_scalar, read_scalars
from trainer_kit.utils.event_file import summary_writer
from trainer_kit.utils.run_log import NAME, append_record
from trainer_kit.utils.streams import guard_standard_streams, warn_of_failed_streams
from trainer_kit.utils.write_errors import WriteErrors


class TensorBoardTracker:
    """Tracker that writes numbers as scalars into TensorBoard event files.

    Args:
        folder: Folder of the event files.
        options: Arguments of torch's `SummaryWriter`.
    """

    name = "tensorboard"

    def __init__(self, folder: Path, **options: Any) -> None:
        self.tracker = summary_writer(str(folder), **options)
        self._errors = WriteErrors("the tracker 'tensorboard' could not write", self._reopen)

    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        """Write the settings of the run as text.

        Args:
            values: Settings by name.
        """
        text = json.dumps(values, indent=2, default=str)
        self.tracker.add_text("config", f"```json\n{text}\n```", 0)
        self.tracker.flush()

    def log(self, values: Mapping[str, Any], step: int | None = None) -> None:
        """Write one record.

        Args:
            values: Numbers, texts or mappings of numbers, by name.
            step: Step of the record; None if it has none.

        Raises:
            TypeError: If a value is neither a number, text nor a mapping of numbers; the message names it.
        """
        with self._errors.warned():
            for name, value in values.items():
                if isinstance(value, str):
                    self.tracker.add_text(name, value, step)
                elif isinstance(value, Real):
                    self.tracker.add_scalar(name, value, step)
                elif isinstance(value, Mapping):
                    self.tracker.add_scalars(name, value, step)
                else:
                    as_scalar(name, value)  # raises the error
            self.tracker.flush()

    def finish(self) -> None:
        """Close the files."""
        with self._errors.warned():
            self.tracker.close()

    def _reopen(self) -> None:
        """Let the next record begin another file."""
        try:
            self.tracker.close()
        finally:
            self.tracker.file_writer = None


class JsonLinesTracker:
    """Tracker that appends records to `log.jsonl`, which `trainer_kit.callbacks.read_log` reads.

    Args:
        folder: Folder of the file.
    """

    name = "jsonl"

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.tracker = folder / NAME
        self._errors = WriteErrors("the tracker 'jsonl' could not write")

    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        """Write the settings of the run.

        Args:
            values: Settings by name.
        """
        append_record(self.tracker, "config", 0, {"trainer_kit": __version__, "arguments": values})

    def log(self, values: Mapping[str, Any], step: int | None = None) -> None:
        """Write one record.

        Args:
            values: Values by name.
            step: Step of the record; None is written as 0.
        """
        with self._errors.warned():
            append_record(self.tracker, "log", step or 0, values)

    def finish(self) -> None:
        """Do nothing: each record is flushed as it is written."""


class NoTracker:
    """Tracker without effect, for the processes that do not write: any call does nothing."""

    def __getattr__(self, name: str) -> Any:
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self


KNOWN = {"tensorboard": TensorBoardTracker, "jsonl": JsonLinesTracker}


def chosen_trackers(log_with: Any) -> list[Any]:
    """Return the names and objects that `log_with` selects, a list even of one."""
    if log_with is None:
        return []
    chosen: list[Any] = []
    for entry in log_with if isinstance(log_with, (list, tuple)) else [log_with]:
        name = getattr(entry, "value", entry)  # value of an enum
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


class Tracking(ProcessInfo):
    """The part of an `Accelerator` that logs.

    Args:
        strategy: Strategy that is set up.
        log_with: Trackers to use; see `Accelerator`.
        project: Where files go.
        accumulation: Settings of gradient accumulation.

    Attributes:
        trackers: Trackers that were started; empty except on the main process.
        project_configuration: Where files go.

    Raises:
        ValueError: If a name in `log_with` is unknown.
        TypeError: If an object in it has no method `log`.
    """

    def __init__(
        self,
        strategy: Strategy,
        log_with: Any,
        project: ProjectConfiguration,
        accumulation: GradientAccumulationPlugin | None = None,
    ) -> None:
        guard_standard_streams()
        super().__init__(strategy, accumulation)
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
        """Start the trackers in `log_with`, on the main process.

        Args:
            project_name: Folder in `logging_dir` for the trackers that write files.
            config: Settings of the run to write; None writes none.
            init_kwargs: More arguments of a tracker, by its name.

        Raises:
            ValueError: If a tracker writes files, but there is no folder.
        """
        trackers = []
        for tracker in self._chosen_trackers if self.is_main_process else ():
            if isinstance(tracker, str):
                if self.logging_dir is None:
                    raise ValueError(
                        f"log_with={tracker!r} writes files; give Accelerator project_dir= or logging_dir="
                    )
                options = (init_kwargs or {}).get(tracker, {})
                tracker = KNOWN[tracker](Path(self.logging_dir) / project_name, **options)
            elif hasattr(tracker, "start"):
                tracker.start()
            if config is not None and hasattr(tracker, "store_init_configuration"):
                tracker.store_init_configuration(dict(config))
            trackers.append(tracker)
        self.trackers = trackers

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """Return a tracker by name; on processes other than the main one, a tracker without effect.

        Args:
            name: Name of the tracker.
            unwrap: Whether to return the underlying writer instead.

        Raises:
            ValueError: If no tracker has this name.
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
        """Pass a record to all trackers, on the main process.

        Args:
            values: Numbers by name.
            step: Step of the record; None if it has none.
            log_kwargs: More arguments of a tracker's `log`, by its name.

        Raises:
            TypeError: If TensorBoard gets a value that is neither a number, text nor a mapping of numbers; the message
                names it.
        """
        if not self.trackers:
            return
        warn_of_failed_streams()
        record = _plain_record(values, self.strategy)
        for tracker in self.trackers:
            tracker.log(dict(record), step=step, **(log_kwargs or {}).get(getattr(tracker, "name", ""), {}))

    def end_training(self) -> None:
        """Close the trackers and tear down the strategy; call it at the end of the run, on all processes."""
        for tracker in self.trackers:
            if hasattr(tracker, "finish"):
                tracker.finish()
        self.trackers = []
        self.strategy.teardown()


def _plain_record(values: Mapping[str, Any], strategy: Strategy) -> dict[str, Any]:
    """Convert numbers to Python's, in mappings too, with one read from the device; keep other values."""
    flat: dict[tuple[str, ...], Any] = {}
    for name, value in values.items():
        parts: dict[tuple[str, ...], Any] = {(name,): value}
        if isinstance(value, Mapping) and value:
            parts = {(name, str(key)): each for key, each in value.items()}
        for key, each in parts.items():
            try:
                flat[key] = as_scalar(name, each)
            except TypeError:
                flat[key] = each
    record: dict[str, Any] = {}
    for (name, *rest), each in read_scalars(flat, strategy).items():
        if rest:
            record.setdefault(name, {})[rest[0]] = each
        else:
            record[name] = each
    return record
