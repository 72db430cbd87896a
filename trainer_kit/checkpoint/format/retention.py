"""Retention of a run's checkpoints, and the deletion of the others."""

from __future__ import annotations

import dataclasses
import logging
import math
import os
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import NamedTuple

from trainer_kit.checkpoint.format.disk import fsync_directory, remove_folder
from trainer_kit.checkpoint.format.manifest import STAGING_PREFIX

_logger = logging.getLogger("trainer_kit")


class Committed(NamedTuple):
    """A checkpoint that a run has committed.

    Attributes:
        name: Name of the checkpoint's folder.
        number: Number of the checkpoint in the run, from 1.
        metric: Metric of the evaluation at its step; None without one.
    """

    name: str
    number: int
    metric: float | None = None


@dataclasses.dataclass(frozen=True)
class Retention:
    """Rule that keeps the newest checkpoints, the best, and those whose number is a multiple of `every`.

    Attributes:
        newest: Number of newest checkpoints to keep; None: all.
        best: Number of best checkpoints to keep, by metric; of equal ones, the earlier.
        every: Interval of checkpoint numbers to keep; None: none for their number.
        greater_is_better: Whether the largest metric is the best.

    Raises:
        ValueError: If `newest` is less than 1.
    """

    newest: int | None = None
    best: int = 1
    every: int | None = None
    greater_is_better: bool = False

    def __post_init__(self) -> None:
        if self.newest is not None and self.newest < 1:
            raise ValueError(f"keep={self.newest} would delete every checkpoint; use None to keep all, or at least 1")

    def stays(self, committed: Sequence[Committed]) -> list[Committed]:
        """Return the checkpoints to keep, in the given order.

        Args:
            committed: The run's checkpoints, oldest first.
        """
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
    """Delete the checkpoints of a run that the retention rule does not keep.

    A checkpoint is renamed to a hidden name before its deletion, so that a kill leaves no seemingly valid checkpoint.

    Args:
        folder: Folder of the run.
        committed: The run's checkpoints, oldest first; nothing else is deleted.
        retention: The retention rule.
        protect: Names of checkpoints to keep in any case.
        is_own: Returns whether a checkpoint still belongs to the run; called before its deletion.

    Returns:
        The remaining checkpoints, oldest first.
    """
    stay, remaining = retention.stays(committed), []
    for each in committed:
        path = folder / each.name
        if each in stay or each.name in protect or (is_own(path) and not delete_checkpoint(path)):
            remaining.append(each)
    return remaining


def delete_checkpoint(path: Path) -> bool:
    """Delete a checkpoint; log a warning if that fails.

    A link is not deleted, since its target is outside of the run's folder.

    Returns:
        Whether the checkpoint no longer exists.
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
