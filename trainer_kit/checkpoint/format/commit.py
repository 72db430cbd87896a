"""Writing a checkpoint: staged beside its place, flushed to the disk, committed by one rename."""

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
from trainer_kit.checkpoint.format.safetensors_writer import ToHost, save_tensors
from trainer_kit.checkpoint.format.snapshot import Snapshot

_TAKEN = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR)  # somebody else has put something there meanwhile


def write_checkpoint(
    output_dir: Path,
    snapshot: Snapshot,
    *,
    max_shard_size: int | str = "5GB",
    name: str | None = None,
    to_host: ToHost = torch.Tensor.cpu,
    confirm: Callable[[], object] = lambda: None,
) -> Path:
    """Writes `output_dir/checkpoint-STEP`: it is there whole, or not at all.

    A checkpoint of the same name is replaced; it stays in place until the new one is whole. May run in a thread of
    its own, one call at a time, where the snapshot holds copies.

    Args:
        output_dir: Made if it does not exist.
        snapshot: What to write.
        max_shard_size: See `save_tensors`; holds for the tensors of each state too.
        name: Of the folder, instead of checkpoint-STEP.
        to_host: See `save_tensors`.
        confirm: Called right before the checkpoint takes its place; it does not where this raises.

    Returns:
        The checkpoint's folder.

    Raises:
        ValueError: If `max_shard_size` or the path of a file makes no sense.
        OSError: If the disk is full or cannot be written, naming the file. Older checkpoints stay as they are.
    """
    final = output_dir / (name or f"{CHECKPOINT_PREFIX}{snapshot.step}")
    staging = output_dir / f"{STAGING_PREFIX}{final.name}-{os.getpid()}"
    make_run_folder(output_dir)
    remove_folder(staging)  # of an earlier process that had the same number
    try:
        os.mkdir(staging)
        _seal(staging, _write(staging, snapshot, max_shard_size, to_host), snapshot)
        confirm()
        _commit(staging, final)
    except BaseException:
        remove_folder(staging)
        raise
    return final


def _write(staging: Path, snapshot: Snapshot, max_shard_size: int | str, to_host: ToHost) -> dict[str, FileEntry]:
    """Writes all files but the manifest; returns what that says of them."""
    written = {}
    for name, content in snapshot.files.items():
        path = inside(staging, name)
        make_folders(path.parent)
        written[name] = write_file(path, [content])
    for stem, tensors in {"model": snapshot.model, **snapshot.more_models}.items():
        written |= save_tensors(tensors, staging, stem, max_shard_size, to_host)
    make_folders(staging / STATE_FOLDER)
    for name, (tree, tensors) in snapshot.states.items():
        path = staging / STATE_FOLDER / f"{name}.json"
        files = save_tensors(tensors, path.parent, name, max_shard_size, to_host) if tensors else {}
        files[path.name] = write_json(path, tree, indent=None)
        written |= {f"{STATE_FOLDER}/{file}": entry for file, entry in files.items()}
    written[ARGUMENTS_NAME] = write_json(staging / ARGUMENTS_NAME, snapshot.arguments)
    return written


def _seal(staging: Path, written: Mapping[str, FileEntry], snapshot: Snapshot) -> None:
    """Writes the manifest and flushes all folders, as the files are already: what is renamed then is whole."""
    write_json(staging / MANIFEST_NAME, Manifest.of(written, snapshot.step, snapshot.world_size).to_json())
    for folder in {staging / parent for name in written for parent in PurePosixPath(name).parents}:
        fsync_directory(folder)


def _commit(staging: Path, final: Path) -> None:
    """Puts the staged folder in its place; one that is there moves aside first (see `reader.recover_replaced`)."""
    replaced = final.with_name(f"{REPLACED_PREFIX}{final.name}")
    if final.exists():
        remove_folder(replaced)
        rename_folder(final, replaced)
    try:
        rename_folder(staging, final)
    except BaseException as error:
        if not (isinstance(error, OSError) and error.errno in _TAKEN):
            remove_folder(final)  # no more than a part of it can be there
        if replaced.exists() and not final.exists():
            rename_folder(replaced, final)
        raise
    fsync_directory(final.parent)
    remove_folder(replaced)
