"""Trackers by name."""

from __future__ import annotations

from typing import Any

from trainer_kit.config.reporters import OTHER_TRACKERS
from trainer_kit.trackers.aim import AimTracker
from trainer_kit.trackers.clearml import ClearMLTracker
from trainer_kit.trackers.comet import CometMLTracker
from trainer_kit.trackers.dvclive import DVCLiveTracker
from trainer_kit.trackers.jsonl import JsonLinesTracker
from trainer_kit.trackers.mlflow import MLflowTracker
from trainer_kit.trackers.swanlab import SwanLabTracker
from trainer_kit.trackers.tensorboard import TensorBoardTracker
from trainer_kit.trackers.tracker import Tracker
from trainer_kit.trackers.trackio import TrackioTracker
from trainer_kit.trackers.wandb import WandBTracker

TRACKERS: dict[str, type[Any]] = {
    each.name: each
    for each in (
        *(TensorBoardTracker, JsonLinesTracker, WandBTracker, MLflowTracker, TrackioTracker, CometMLTracker),
        *(ClearMLTracker, DVCLiveTracker, SwanLabTracker, AimTracker),
    )
}
"""Classes of trackers by name; accelerate's `register_tracker_class` adds to them."""


def installed_trackers() -> list[str]:
    """Return the names of the trackers whose packages are installed."""
    return [name for name, kind in TRACKERS.items() if not issubclass(kind, Tracker) or kind.is_installed()]


def tracker_name(tracker: Any) -> str:
    """Return the name of a tracker, which may be of another class than `Tracker`."""
    return str(getattr(tracker, "name", "") or type(tracker).__name__)


def check_name(name: str, setting: str) -> None:
    """Check that there is a tracker of this name, and that its package is installed.

    Args:
        name: The name.
        setting: The argument that has it, for errors.

    Raises:
        ValueError: If no tracker has the name.
        ImportError: If its package is not installed.
    """
    if name not in TRACKERS:
        if name in OTHER_TRACKERS:
            raise ValueError(f"{setting}={name!r} is not allowed; {OTHER_TRACKERS[name]}")
        raise ValueError(
            f"{setting}={name!r} is not known; use {', '.join(map(repr, TRACKERS))}, or an object with "
            "log(values, step), such as a subclass of trainer_kit.trackers.Tracker"
        )
    kind = TRACKERS[name]
    if issubclass(kind, Tracker):
        kind.check_installed()


def check_tracker(tracker: Any, setting: str) -> None:
    """Check that an object is a `Tracker`, one of accelerate, or has a method `log`.

    Args:
        tracker: The object.
        setting: The argument that has it, for errors.

    Raises:
        TypeError: If it is a class or has no method `log`.
    """
    if isinstance(tracker, type) or not callable(getattr(tracker, "log", None)):
        raise TypeError(f"{setting} holds {tracker!r}, which has no log(values, step); give a tracker's instance")


def make_tracker(chosen: Any, setting: str) -> Any:
    """Return a tracker, made by its name if it is given by name.

    Args:
        chosen: Name of a tracker that needs no folder, or a tracker.
        setting: The argument that has it, for errors.

    Raises:
        ValueError: If the name is unknown.
        TypeError: If an object is no tracker.
        ImportError: If the package of the tracker is not installed.
    """
    if isinstance(chosen, str):
        check_name(chosen, setting)
        return TRACKERS[chosen]()
    check_tracker(chosen, setting)
    return chosen
