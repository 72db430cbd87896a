"""Trackers of an `Accelerator`, and the names of accelerate's module `tracking`."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from trainer_kit.accelerator.process_info import ProcessInfo
from trainer_kit.accelerator.utils.dataclasses import GradientAccumulationPlugin, LoggerType, ProjectConfiguration
from trainer_kit.strategies.base import Strategy
from trainer_kit.strategies.scalars import as_scalar, read_scalars
from trainer_kit.trackers import (
    TRACKERS,
    AimTracker,
    ClearMLTracker,
    CometMLTracker,
    DVCLiveTracker,
    MLflowTracker,
    SwanLabTracker,
    TensorBoardTracker,
    Tracker,
    TrackioTracker,
    WandBTracker,
)
from trainer_kit.trackers.registry import check_name, check_tracker, installed_trackers, tracker_name
from trainer_kit.utils.streams import guard_standard_streams, warn_of_failed_streams
from trainer_kit.utils.user_warnings import warn

__all__ = [
    "LOGGER_TYPE_TO_CLASS",
    "AimTracker",
    "ClearMLTracker",
    "CometMLTracker",
    "DVCLiveTracker",
    "GeneralTracker",
    "MLflowTracker",
    "NoTracker",
    "SwanLabTracker",
    "TensorBoardTracker",
    "TrackerHost",
    "TrackioTracker",
    "WandBTracker",
    "filter_trackers",
    "get_available_trackers",
    "on_main_process",
    "register_tracker_class",
]

Method = TypeVar("Method", bound=Callable[..., Any])

GeneralTracker = Tracker
LOGGER_TYPE_TO_CLASS = TRACKERS


def get_available_trackers() -> list[LoggerType]:
    """Return the trackers of accelerate whose packages are installed."""
    return [LoggerType(name) for name in installed_trackers() if name in LoggerType.list()]


def register_tracker_class(tracker_class: type[Any]) -> None:
    """Let `log_with` name a class of trackers by its attribute `name`.

    The class gets the project's name as its first argument, the logging folder as its second if its
    `requires_logging_directory` is True, and its `init_kwargs`.

    Raises:
        ValueError: If it is no class with `log`, `name` and `requires_logging_directory`.
    """
    missing = [each for each in ("log", "name", "requires_logging_directory") if not hasattr(tracker_class, each)]
    if not isinstance(tracker_class, type) or missing:
        raise ValueError(f"{tracker_class!r} is no class of trackers: it has no {', '.join(missing) or 'constructor'}")
    if tracker_class.name in TRACKERS:
        warn(f"the tracker {tracker_class.name!r} is replaced by {tracker_class.__name__}")
    TRACKERS[tracker_class.name] = tracker_class


def on_main_process(function: Method) -> Method:
    """Let a method of a tracker do nothing on processes other than the main one, if `main_process_only`."""

    @functools.wraps(function)
    def on_main(self: Any, *args: Any, **kwargs: Any) -> Any:
        from trainer_kit.accelerator.state import PartialState

        if getattr(self, "main_process_only", False) and not PartialState().is_main_process:
            return None
        return function(self, *args, **kwargs)

    return on_main  # type: ignore[return-value]


def filter_trackers(log_with: Any, logging_dir: str | os.PathLike[str] | None = None) -> list[Any]:
    """Return the names and objects that `log_with` selects, once each.

    Args:
        log_with: A name, a member of `LoggerType`, a tracker, or a list of these; "all" selects all trackers that are
            installed.
        logging_dir: Folder for the trackers that write files; None if there is none.

    Raises:
        ValueError: If a name is unknown, or its tracker needs a folder.
        TypeError: If an object is no tracker.
        ImportError: If the package of a tracker is not installed.
    """
    chosen = chosen_trackers(log_with)
    for name in chosen:
        _check_folder(name, logging_dir)
    return chosen


def chosen_trackers(log_with: Any) -> list[Any]:
    """Return the names and objects that `log_with` selects, once each."""
    if log_with is None:
        return []
    chosen: list[Any] = []
    for entry in log_with if isinstance(log_with, (list, tuple)) else [log_with]:
        name = getattr(entry, "value", entry)  # value of an enum
        if name == "all":
            chosen += [each for each in installed_trackers() if each not in chosen]
            continue
        if isinstance(name, str):
            check_name(name, "log_with")
        else:
            check_tracker(name, "log_with")
        if name not in chosen:
            chosen.append(name)
    return chosen


def _check_folder(name: Any, folder: str | os.PathLike[str] | None) -> None:
    if isinstance(name, str) and TRACKERS[name].requires_logging_directory and folder is None:
        raise ValueError(f"log_with={name!r} writes files; give Accelerator project_dir= or logging_dir=")


class NoTracker:
    """Tracker without effect, for the processes that do not write: any call does nothing."""

    def __getattr__(self, name: str) -> Any:
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self


class TrackerHost(ProcessInfo):
    """The part of an `Accelerator` that logs.

    Args:
        strategy: Strategy that is set up.
        log_with: Trackers to use; see `Accelerator`.
        project: Where files go.
        accumulation: Settings of gradient accumulation.

    Attributes:
        log_with: Names and objects of the trackers that `init_trackers` starts.
        trackers: Trackers that were started; empty except on the main process.
        project_configuration: Where files go.

    Raises:
        ValueError: If a name in `log_with` is unknown.
        TypeError: If an object in it has no method `log`.
        ImportError: If the package of a tracker is not installed.
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
        self.log_with = chosen_trackers(log_with)

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
            project_name: Project of the run; for the trackers that write files, a folder in `logging_dir`.
            config: Settings of the run to write; None writes none.
            init_kwargs: More arguments of a tracker, by its name.

        Raises:
            ValueError: If a tracker writes files, but there is no folder.
            RuntimeError: If a tracker cannot begin a run, such as without a login.
        """
        self.trackers = []
        for chosen in self.log_with if self.is_main_process else ():
            tracker = chosen
            if isinstance(chosen, str):
                tracker = self._made(chosen, project_name, (init_kwargs or {}).get(chosen, {}))
            if hasattr(tracker, "start"):
                tracker.start()
            if config is not None and hasattr(tracker, "store_init_configuration"):
                tracker.store_init_configuration(dict(config))
            self.trackers.append(tracker)

    def _made(self, name: str, project: str, options: Mapping[str, Any]) -> Any:
        kind = TRACKERS[name]
        if not kind.requires_logging_directory:
            return kind(project, **options)
        _check_folder(name, self.logging_dir)
        return kind(project, Path(str(self.logging_dir)), **options)

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
            if tracker_name(tracker) == name:
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
            tracker.log(dict(record), step=step, **(log_kwargs or {}).get(tracker_name(tracker), {}))

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
