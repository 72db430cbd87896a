"""Which checkpoints stay."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection
from pathlib import Path

from trainer_kit.checkpoint.files import fsync_directory, remove_folder
from trainer_kit.checkpoint.format import STAGING_PREFIX

_logger = logging.getLogger("trainer_kit")


def prune(committed: list[Path], keep: int | None, protect: Collection[Path]) -> list[Path]:
    """Deletes the oldest checkpoints of a run.

    The newest and the protected ones always stay, and count. A checkpoint gets a hidden name before its files are
    deleted, so that a kill in between leaves none that looks whole.

    Args:
        committed: What this run committed, oldest first; nothing else is ever deleted.
        keep: How many stay; None keeps all.
        protect: Those that stay in any case, such as the best one.

    Returns:
        Those that remain, oldest first.

    Raises:
        ValueError: If `keep` is below 1.
    """
    if keep is None:
        return list(committed)
    if keep < 1:
        raise ValueError(f"keep={keep} would delete every checkpoint; use None to keep all, or a positive number")
    removable = [path for path in committed[:-1] if path not in protect]
    excess = removable[: max(0, len(committed) - keep)]
    removed = {path for path in excess if _delete(path)}
    return [path for path in committed if path not in removed]


def _delete(path: Path) -> bool:
    """Whether the checkpoint is gone; where the file system refuses, a warning says so and the run goes on."""
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
