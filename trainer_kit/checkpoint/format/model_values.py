"""Entries of a model's `state_dict` that are no tensors, such as a dict that `get_extra_state` returns."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from trainer_kit.checkpoint.format.discovery import read_state
from trainer_kit.checkpoint.format.disk import fsync_directory, write_json
from trainer_kit.checkpoint.format.json_files import read_json
from trainer_kit.checkpoint.format.manifest import MANIFEST_NAME, STATE_FOLDER, Manifest
from trainer_kit.checkpoint.format.safetensors_reader import load_tensors
from trainer_kit.checkpoint.format.safetensors_writer import ToHost, is_file_of, save_tensors
from trainer_kit.errors import CheckpointError
from trainer_kit.utils.pytree import flatten_state, unflatten_state


def values_name(stem: str = "model") -> str:
    """Return the name under which the values of a model are kept, whose tensors' files begin with `stem`."""
    return f"{stem}_values"


def split_values(state: Mapping[str, Any]) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return the tensors of a model's `state_dict`, and its other values, by name."""
    tensors = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
    return tensors, {name: value for name, value in state.items() if name not in tensors}


def write_values(directory: Path, values: Mapping[str, Any], to_host: ToHost = torch.Tensor.cpu) -> None:
    """Write a model's values to a folder without a manifest, or remove those of another model that it holds.

    Raises:
        TypeError: If a value is of a type that cannot be kept.
        ValueError: If the values are too large as JSON.
        OSError: If the disk is full or cannot be written.
    """
    tree, tensors = flatten_state(dict(values))
    name = values_name()
    stale = [path for path in directory.iterdir() if is_file_of(path.name, name) or path.name == f"{name}.json"]
    if tensors:
        save_tensors(tensors, directory, name, to_host=to_host)
    if values:
        write_json(directory / f"{name}.json", tree)
    for path in stale:
        if not (values if path.suffix == ".json" and not path.name.endswith(".index.json") else tensors):
            path.unlink(missing_ok=True)
    fsync_directory(directory)


def read_values(checkpoint: Path, stem: str, is_verified: bool) -> dict[str, Any] | None:
    """Return a model's values from a checkpoint or a folder; None if it is not known whether the model had any.

    Args:
        checkpoint: A checkpoint, a folder of weights or a file.
        stem: Prefix of the names of the files with the model's tensors.
        is_verified: Whether the checkpoint has just been verified.

    Raises:
        CheckpointError: If a file is damaged.
    """
    name = values_name(stem)
    if (checkpoint / MANIFEST_NAME).exists():
        if not is_verified:
            manifest, prefix = Manifest.read(checkpoint), f"{STATE_FOLDER}/{name}."
            manifest.check(checkpoint, [each for each in manifest.files if each.startswith(prefix)])
        values = read_state(checkpoint, name) or {}
    elif (path := checkpoint / f"{name}.json").exists():
        has_tensors = any(is_file_of(each.name, name) for each in checkpoint.iterdir())
        try:
            values = unflatten_state(read_json(path), load_tensors(checkpoint, name) if has_tensors else {})
        except ValueError as error:
            raise CheckpointError(f"{path} does not fit its tensors: {error}") from error
    else:
        return None
    if not isinstance(values, dict):
        raise CheckpointError(f"{checkpoint} is damaged: its {name}.json holds no values by name")
    return values
