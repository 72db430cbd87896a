"""Inventory of a run's folder: its checkpoints, their validity, and the progress of the run."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from trainer_kit.checkpoint.format.base_reference import BaseReference
from trainer_kit.checkpoint.format.discovery import find_checkpoints, is_of_run, read_arguments, verify
from trainer_kit.checkpoint.format.manifest import (
    ARGUMENTS_NAME,
    CHECKPOINT_PREFIX,
    MANIFEST_NAME,
    STATE_FOLDER,
    Manifest,
)
from trainer_kit.checkpoint.format.retention import Committed, Retention
from trainer_kit.checkpoint.format.trainer_state import read_committed, read_trainer
from trainer_kit.errors import CheckpointError, UnreadableError

CRASH_PREFIX = "crash-"
PREFIXES = (CHECKPOINT_PREFIX, "checkpoint_", CRASH_PREFIX)
"""Prefixes of the folders that the Trainer, the Accelerator and a crash dump write."""


class CheckpointEntry(NamedTuple):
    """A checkpoint on the disk.

    Attributes:
        directory: Folder of the checkpoint.
        size: Size of all files, in bytes.
        manifest: The manifest; None if it cannot be read.
        problem: Why the checkpoint is invalid; None if it is valid.
        is_damaged: Whether this is a damaged checkpoint of trainer_kit; False if it is valid, unreadable, or without a
            manifest.
    """

    directory: Path
    size: int
    manifest: Manifest | None
    problem: str | None
    is_damaged: bool


class CheckpointProgress(NamedTuple):
    """Progress of a run, as recorded in a checkpoint.

    Attributes:
        run_id: ID of the run.
        committed: The run's existing checkpoints up to this one, oldest first.
        best_step: Step of the best evaluation; None before the first.
        best_metric: Metric of the best evaluation; None before the first.
        metric_name: Name of the metric that defines "best"; None without one.
        greater_is_better: Whether the largest value is the best.
    """

    run_id: str
    committed: list[Committed]
    best_step: int | None
    best_metric: float | None
    metric_name: str | None
    greater_is_better: bool


def checkpoints_at(path: Path) -> list[Path]:
    """Return the checkpoint at a path, or all checkpoints in the folder of a run, oldest first.

    Raises:
        CheckpointError: If the path is no folder, or holds no checkpoints.
    """
    if not path.is_dir():
        what = "is a file" if path.exists() else "does not exist"
        raise CheckpointError(f"{path} {what}; give the output_dir of a run, or one of its checkpoints")
    path = path if path.name not in ("", "..") else path.resolve()
    if (path / MANIFEST_NAME).exists():
        return [path]
    for prefix in PREFIXES:
        if found := find_checkpoints(path, prefix):
            return found
    if path.name in [each.name for prefix in PREFIXES for each in find_checkpoints(path.parent, prefix)]:
        return [path]
    raise CheckpointError(f"{path} holds no checkpoints; give the output_dir of a run, or one of its checkpoints")


def inspect(directory: Path, quick: bool = False) -> CheckpointEntry:
    """Verify a checkpoint: all checksums, or only the manifest and the sizes with `quick`."""
    manifest, problem, is_damaged = None, None, False
    try:
        manifest = Manifest.read(directory)
        if quick:
            manifest.check_sizes(directory)
            if (base := BaseReference.read(directory)) is not None:
                base.verify(directory, quick=True)
        else:
            verify(directory)
    except (CheckpointError, OSError) as error:
        problem = str(error).replace(f"{directory}{os.sep}", "").removeprefix(f"{directory} ")
        is_damaged = not isinstance(error, (UnreadableError, OSError)) and (directory / MANIFEST_NAME).is_file()
    return CheckpointEntry(directory, _size(directory), manifest, problem, is_damaged)


def newest_progress(found: Iterable[Path]) -> CheckpointProgress | None:
    """Return the progress in the newest readable one of these checkpoints (oldest first); None if there is none."""
    for directory in reversed(list(found)):
        with contextlib.suppress(CheckpointError):
            return _progress(directory)
    return None


def _progress(directory: Path) -> CheckpointProgress:
    manifest = Manifest.read(directory)
    manifest.check(directory, {ARGUMENTS_NAME, f"{STATE_FOLDER}/trainer.json"} & manifest.files.keys())
    trainer, arguments = read_trainer(directory), read_arguments(directory)
    if trainer is None:
        raise CheckpointError(f"{directory} holds no state of a Trainer's run")
    try:
        return CheckpointProgress(
            run_id=trainer["run_id"],
            committed=[each for each in read_committed(trainer) if (directory.parent / each.name).is_dir()],
            best_step=trainer["counters"]["best_step"],
            best_metric=trainer["counters"]["best_metric"],
            metric_name=arguments["metric_for_best_model"],
            greater_is_better=bool(arguments["greater_is_better"]),
        )
    except KeyError as error:
        raise CheckpointError(f"{directory / ARGUMENTS_NAME} is damaged: it lacks {error}") from error


def excess(
    entries: Sequence[CheckpointEntry], known: CheckpointProgress, retention: Retention
) -> list[CheckpointEntry]:
    """Return the valid checkpoints of a run that the retention rule would delete.

    Args:
        entries: Checkpoints in the run's folder; invalid ones and those of other runs are ignored.
        known: Progress of the run.
        retention: The retention rule.
    """
    names = {entry.directory.name for entry in entries if entry.problem is None}
    committed = [each for each in known.committed if each.name in names]
    stay = retention.stays(committed)
    gone = {each.name for each in committed if each not in stay}
    candidates = [entry for entry in entries if entry.directory.name in gone]
    return [entry for entry in candidates if is_of_run(entry.directory, "trainer", known.run_id)]


def _size(directory: Path) -> int:
    try:
        return sum(path.lstat().st_size for path in directory.rglob("*") if not path.is_dir())
    except FileNotFoundError:  # the run is removing it
        return 0
