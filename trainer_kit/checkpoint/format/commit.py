"""Writing of a checkpoint: staged in a sibling folder, flushed to the disk, committed by one rename."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath

import torch

from trainer_kit.checkpoint.format.disk import (
    fsync_directory,
    make_folders,
    make_run_folder,
    remove_folder,
    rename_folder,
    write_file,
    write_json,
)
from trainer_kit.checkpoint.format.json_files import inside
from trainer_kit.checkpoint.format.manifest import (
    ARGUMENTS_NAME,
    CHECKPOINT_PREFIX,
    MANIFEST_NAME,
    REPLACED_PREFIX,
    STAGING_PREFIX,
    STATE_FOLDER,
    FileEntry,
    Manifest,
)
from trainer_kit.checkpoint.format.safetensors_writer import ToHost, write_shards
from trainer_kit.checkpoint.format.snapshot import Snapshot
from trainer_kit.config import environment

_TAKEN = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR)  # another process has created it meanwhile


def write_checkpoint(
    output_dir: Path,
    snapshot: Snapshot,
    *,
    max_shard_size: int | str = "5GB",
    name: str | None = None,
    to_host: ToHost = torch.Tensor.cpu,
    confirm: Callable[[], object] = lambda: None,
) -> Path:
    """Write `output_dir/checkpoint-STEP` atomically.

    A checkpoint of the same name is replaced once the new one is complete. If the snapshot holds copies, the call may
    run in another thread, one call at a time.

    Args:
        output_dir: Folder of the run; created if missing.
        snapshot: Content of the checkpoint.
        max_shard_size: See `save_tensors`; applies to the tensors of each state too.
        name: Name of the checkpoint's folder; None: checkpoint-STEP.
        to_host: See `save_tensors`.
        confirm: Called immediately before the commit; if it raises, nothing is committed.

    Returns:
        Folder of the checkpoint.

    Raises:
        ValueError: If `max_shard_size` is invalid, or a state is too large as JSON.
        CheckpointError: If the path of a file leads out of the checkpoint.
        OSError: If the disk is full or cannot be written; the message names the file. Older checkpoints stay intact.
    """
    staging = open_staging(output_dir, name or f"{CHECKPOINT_PREFIX}{snapshot.step}")
    try:
        written = write_part(staging, snapshot, max_shard_size, to_host)
        return commit_staging(staging, written, snapshot, confirm)
    except BaseException:
        remove_folder(staging)
        raise


def staging_folder(final: Path) -> Path:
    """Return the folder in which this process stages a checkpoint of this path."""
    return final.with_name(f"{STAGING_PREFIX}{final.name}-{os.getpid()}")


def open_staging(output_dir: Path, name: str) -> Path:
    """Create the folder in which a checkpoint of this name is staged.

    Raises:
        OSError: If the folder cannot be created.
    """
    staging = staging_folder(output_dir / name)
    make_run_folder(output_dir)
    remove_folder(staging)  # of an earlier process with the same PID
    try:
        os.mkdir(staging)
        os.mkdir(staging / STATE_FOLDER)  # now: another process must not create it again after a failed save
    except BaseException:
        remove_folder(staging)
        raise
    return staging


def write_part(
    staging: Path, snapshot: Snapshot, max_shard_size: int | str = "5GB", to_host: ToHost = torch.Tensor.cpu
) -> dict[str, FileEntry]:
    """Write one writer's files of a staged checkpoint, and flush them.

    Args:
        staging: Folder that `open_staging` created on writer 0.
        snapshot: Snapshot of this writer.
        max_shard_size: See `write_checkpoint`.
        to_host: See `write_checkpoint`.

    Returns:
        Entries of the files for the manifest, by relative path.

    Raises:
        OSError: See `write_checkpoint`.
    """
    written = _write_own_files(staging, snapshot) if snapshot.writer == 0 else {}
    for stem, tensors in snapshot.groups.items():
        path = staging / stem
        shards = snapshot.shards(stem, max_shard_size)
        files = write_shards(shards, tensors, path.parent, path.name, to_host, snapshot.writer)
        written |= {str(PurePosixPath(stem).with_name(file)): entry for file, entry in files.items()}
    return written


def commit_staging(
    staging: Path,
    written: Mapping[str, FileEntry],
    snapshot: Snapshot,
    confirm: Callable[[], object] = lambda: None,
) -> Path:
    """Commit a staged checkpoint whose files are all written.

    Args:
        staging: The folder.
        written: Entries of all files, of all writers.
        snapshot: Snapshot of any writer.
        confirm: See `write_checkpoint`.

    Returns:
        Folder of the checkpoint.

    Raises:
        OSError: See `write_checkpoint`.
    """
    final = staging.with_name(staging.name.removeprefix(STAGING_PREFIX).rpartition("-")[0])
    _seal(staging, written, snapshot)
    confirm()
    _commit(staging, final)
    return final


def _write_own_files(staging: Path, snapshot: Snapshot) -> dict[str, FileEntry]:
    """Write all files but those of tensors and the manifest."""
    written = {}
    for name, content in snapshot.files.items():
        path = inside(staging, name)
        make_folders(path.parent)
        written[name] = write_file(path, [content])
    for name, (tree, _) in snapshot.states.items():
        path = staging / STATE_FOLDER / f"{name}.json"
        written[f"{STATE_FOLDER}/{path.name}"] = write_json(path, tree, indent=None)
    written[ARGUMENTS_NAME] = write_json(staging / ARGUMENTS_NAME, snapshot.arguments)
    return written


def _seal(staging: Path, written: Mapping[str, FileEntry], snapshot: Snapshot) -> None:
    """Write the manifest and flush all folders, so that the staged checkpoint is complete before the rename."""
    membership = environment.membership()
    number = None if membership is None else membership.number
    write_json(staging / MANIFEST_NAME, Manifest.of(written, snapshot.step, snapshot.world_size, number).to_json())
    for folder in {staging / parent for name in written for parent in PurePosixPath(name).parents}:
        fsync_directory(folder)


def _commit(staging: Path, final: Path) -> None:
    """Rename the staged folder to its final name; move an existing one aside first (see `recover_replaced`)."""
    replaced = final.with_name(f"{REPLACED_PREFIX}{final.name}")
    if final.exists():
        remove_folder(replaced)
        rename_folder(final, replaced)
    try:
        rename_folder(staging, final)
    except BaseException as error:
        if not (isinstance(error, OSError) and error.errno in _TAKEN):
            remove_folder(final)  # at most a partial copy
        if replaced.exists() and not final.exists():
            rename_folder(replaced, final)
        raise
    fsync_directory(final.parent)
    remove_folder(replaced)
