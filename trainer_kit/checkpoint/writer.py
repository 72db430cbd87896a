"""Writing a checkpoint: staged beside its place, flushed to the disk, committed by one rename."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from trainer_kit.checkpoint.files import fsync_directory, fsync_file, remove_folder, write_json
from trainer_kit.checkpoint.format import (
    ARGUMENTS_NAME,
    CHECKPOINT_PREFIX,
    REPLACED_PREFIX,
    STAGING_PREFIX,
    STATE_FOLDER,
    Manifest,
    list_files,
)
from trainer_kit.checkpoint.shards import ToHost, save_tensors
from trainer_kit.trees import split

_STATE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")
_SHARD_NAME = re.compile(r"\.safetensors|-\d{5}-of-\d{5}", re.IGNORECASE)


def write_checkpoint(
    output_dir: Path,
    step: int,
    model_state: Mapping[str, torch.Tensor],
    states: Mapping[str, Any],
    *,
    arguments: Mapping[str, Any],
    max_shard_size: int | str = "5GB",
    world_size: int = 1,
    extra: Callable[[Path], None] | None = None,
    name: str | None = None,
    to_host: ToHost = torch.Tensor.cpu,
) -> Path:
    """Writes `output_dir/checkpoint-STEP`: it is there whole, or not at all.

    A checkpoint of the same name is replaced; it stays in place until the new one is whole.

    Args:
        output_dir: Made if it does not exist.
        step: Optimizer steps taken.
        model_state: The model's tensors by name, on any device.
        states: Trees that `trainer_kit.trees.split` takes, by a name made of letters, digits and `._-`.
        arguments: The arguments of the run.
        max_shard_size: See `save_tensors`; holds for the tensors of each state too.
        world_size: Processes of the run.
        extra: Called with the staging folder, to write more plain files into it (config.json, a tokenizer).
        name: Of the folder, instead of checkpoint-STEP.
        to_host: See `save_tensors`.

    Returns:
        The checkpoint's folder.

    Raises:
        ValueError: If `step`, `max_shard_size` or the name of a state makes no sense.
        TypeError: If a state or the arguments hold something that a checkpoint cannot hold, naming its place.
        OSError: If the disk is full or cannot be written. Older checkpoints stay as they are.
    """
    _check_names(step, states)
    final = output_dir / (name or f"{CHECKPOINT_PREFIX}{step}")
    staging = output_dir / f"{STAGING_PREFIX}{final.name}-{os.getpid()}"
    output_dir.mkdir(parents=True, exist_ok=True)
    if staging.exists():  # of an earlier process that had the same number
        shutil.rmtree(staging)
    try:
        staging.mkdir()
        if extra is not None:
            extra(staging)
        save_tensors(model_state, staging, max_shard_size=max_shard_size, to_host=to_host)
        for name, state in states.items():
            _write_state(staging / STATE_FOLDER, name, state, max_shard_size, to_host)
        _write_arguments(staging, arguments)
        _seal(staging, step, world_size)
        _commit(staging, final)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    return final


def _check_names(step: int, states: Mapping[str, Any]) -> None:
    if step < 0:
        raise ValueError(f"step={step} is negative; steps count from 0")
    taken: dict[str, str] = {}
    for name in states:
        if not _STATE_NAME.fullmatch(name) or _SHARD_NAME.search(name):
            raise ValueError(
                f"a state is named {name!r}, which cannot be a file's name; use letters, digits and '._-', "
                "beginning with a letter or digit, without '.safetensors' or '-00001-of-00002'"
            )
        other = taken.setdefault(name.lower(), name)
        if other != name:
            raise ValueError(f"the states {other!r} and {name!r} differ only in case, as files must not; rename one")


def _write_state(directory: Path, name: str, state: Any, max_shard_size: int | str, to_host: ToHost) -> None:
    directory.mkdir(exist_ok=True)
    try:
        tree, tensors = split(state)
        if tensors:
            save_tensors(tensors, directory, name, max_shard_size, to_host)
    except (TypeError, ValueError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(f"the state {name!r} cannot be saved: {error}") from error
    write_json(directory / f"{name}.json", tree, indent=None)


def _write_arguments(staging: Path, arguments: Mapping[str, Any]) -> None:
    tree, tensors = split(dict(arguments))
    if tensors:
        raise TypeError(f"the arguments hold a tensor or an array ({next(iter(tensors))}); give a number or a list")
    write_json(staging / ARGUMENTS_NAME, tree)


def _seal(staging: Path, step: int, world_size: int) -> None:
    """Flushes all files, whoever wrote them, then writes the manifest: a whole manifest means whole files."""
    files = list_files(staging)
    for path in files:
        fsync_file(path)
    for directory in {path.parent for path in files}:
        fsync_directory(directory)
    Manifest.describe(staging, step, world_size).write(staging)
    fsync_directory(staging)


def _commit(staging: Path, final: Path) -> None:
    """Puts the staged folder in its place; one that is there moves aside first (see `reader.recover_replaced`)."""
    replaced = final.with_name(f"{REPLACED_PREFIX}{final.name}")
    if final.exists():
        remove_folder(replaced)
        os.rename(final, replaced)
    try:
        os.rename(staging, final)
    except BaseException:
        if replaced.exists():
            os.rename(replaced, final)
        raise
    fsync_directory(final.parent)
    remove_folder(replaced)
