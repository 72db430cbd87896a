"""Which checkpoints of a run stay, and how the others go."""

from __future__ import annotations

import dataclasses
import logging
import math
import os
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from trainer_kit.checkpoint.format.disk import fsync_directory, remove_folder
from trainer_kit.checkpoint.format.manifest import STAGING_PREFIX

_logger = logging.getLogger("trainer_kit")


@dataclasses.dataclass(frozen=True)
class Committed:
    """A checkpoint that a run has committed.

    Attributes:
        name: Of its folder in the run's.
        number: Which of the run's checkpoints it is, from 1.
        metric: What the evaluation of its step gave; None where there was none.
    """

    name: str
    number: int
    metric: float | None = None


@dataclasses.dataclass(frozen=True)
class Retention:
    """Which checkpoints stay: the newest, the best, and each one whose number is a multiple of `every`.

    Attributes:
        newest: How many of the newest; None keeps all.
        best: How many of the best, by their metric (of equal ones the earlier).
        every: None keeps none for its number.
        greater_is_better: What "best" means.
    """

    newest: int | None = None
    best: int = 1
    every: int | None = None
    greater_is_better: bool = False

    def __post_init__(self) -> None:
        if self.newest is not None and self.newest < 1:
            raise ValueError(f"keep={self.newest} would delete every checkpoint; use None to keep all, or at least 1")

    def stays(self, committed: Sequence[Committed]) -> list[Committed]:
        """Those that stay of a run's checkpoints, which come oldest first, and so do they."""
        if self.newest is None:
            return list(committed)
        sign = -1 if self.greater_is_better else 1
        judged = [
            (sign * each.metric, each) for each in committed if each.metric is not None and not math.isnan(each.metric)
        ]
        best = [each for _, each in sorted(judged, key=lambda pair: pair[0])[: self.best]]
        newest = committed[-self.newest :]
        return [
            each
            for each in committed
            if each in newest or each in best or (self.every is not None and each.number % self.every == 0)
        ]


def prune(
    folder: Path,
    committed: Sequence[Committed],
    retention: Retention,
    protect: Collection[str] = (),
    is_own: Callable[[Path], bool] = lambda path: True,
) -> list[Committed]:
    """Deletes the checkpoints of a run that need not stay.

    A checkpoint gets a hidden name before its files are deleted, so that a kill in between leaves none that looks
    whole.

    Args:
        folder: Of the run.
        committed: What this run committed, oldest first; nothing else is ever deleted.
        retention: Says which stay.
        protect: Names of those that stay in any case.
        is_own: Asked before one is deleted: whether it is still the run's, and not one that somebody put there.

    Returns:
        Those that remain, oldest first.
    """
    stay, remaining = retention.stays(committed), []
    for each in committed:
        path = folder / each.name
        if each in stay or each.name in protect or (is_own(path) and not delete_checkpoint(path)):
            remaining.append(each)
    return remaining


def delete_checkpoint(path: Path) -> bool:
    """Whether the checkpoint is gone; where the file system refuses, a warning says so and the run goes on.

    One that is a link stays: what it leads to lies outside of the run's folder.
    """
    if path.is_symlink():
        _logger.warning("the old checkpoint %s is a link, and stays; remove it and what it leads to by hand", path)
        return False
    hidden = path.with_name(f"{STAGING_PREFIX}delete-{path.name}-{os.getpid()}")
    try:
        os.rename(path, hidden)
        fsync_directory(path.parent)
    except FileNotFoundError:
        return True
    except OSError as error:
        _logger.warning("the old checkpoint %s could not be deleted: %s", path, error)
        return False
    remove_folder(hidden)
    return True
