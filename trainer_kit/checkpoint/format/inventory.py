"""What lies in the folder of a run: its checkpoints, whether they are whole, and what stands beside them."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

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
"""How the names of folders begin that the Trainer, the Accelerator and a crash write."""


@dataclasses.dataclass(frozen=True)
class CheckpointEntry:
    """A checkpoint as it lies on the disk.

    Attributes:
        directory: Its folder.
        size: Of all its files, in bytes.
        manifest: None where it cannot be read.
        problem: Why it is not valid; None where it is.
        is_damaged: Whether this is one of ours that is not whole; else it is valid, another program's, or not for this
            one to judge.
    """

    directory: Path
    size: int
    manifest: Manifest | None
    problem: str | None
    is_damaged: bool


@dataclasses.dataclass(frozen=True)
class CheckpointProgress:
    """What a checkpoint knows of its run.

    Attributes:
        run_id: Of the run.
        committed: The run's checkpoints up to it, oldest first, as far as they are still there.
        best_step: The step of the best evaluation; None before any.
        best_metric: What that gave.
        metric_name: What "best" means.
        greater_is_better: Whether the largest value is the best.
    """

    run_id: str
    committed: list[Committed]
    best_step: int | None
    best_metric: float | None
    metric_name: str | None
    greater_is_better: bool


def checkpoints_at(path: Path) -> list[Path]:
    """The checkpoints that a path means: itself, or all in the folder of a run, oldest first.

    Raises:
        CheckpointError: If it is no folder, or one without checkpoints.
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
    """Verifies a checkpoint: every checksum, or with `quick` the manifest and the sizes."""
    manifest, problem, is_damaged = None, None, False
    try:
        manifest = Manifest.read(directory)
        if quick:
            manifest.check_sizes(directory)
        else:
            verify(directory)
    except (CheckpointError, OSError) as error:
        problem = str(error).replace(f"{directory}{os.sep}", "").removeprefix(f"{directory} ")
        is_damaged = not isinstance(error, (UnreadableError, OSError)) and (directory / MANIFEST_NAME).is_file()
    return CheckpointEntry(directory, _size(directory), manifest, problem, is_damaged)


def newest_progress(found: Iterable[Path]) -> CheckpointProgress | None:
    """What the newest of these checkpoints (oldest first) that tells it knows of its run; None where none tells."""
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
    """The valid checkpoints of a run that need not stay; damaged ones and those of others do not count."""
    names = {entry.directory.name for entry in entries if entry.problem is None}
    committed = [each for each in known.committed if each.name in names]
    stay = retention.stays(committed)
    gone = {each.name for each in committed if each not in stay}
    candidates = [entry for entry in entries if entry.directory.name in gone]
    return [entry for entry in candidates if is_of_run(entry.directory, "trainer", known.run_id)]


def _size(directory: Path) -> int:
    try:
        return sum(path.lstat().st_size for path in directory.rglob("*") if not path.is_dir())
    except FileNotFoundError:  # its run is removing it
        return 0
