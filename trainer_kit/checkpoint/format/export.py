"""Export of a model: its weights, and the files that transformers' `from_pretrained` needs."""

from __future__ import annotations

import copy
import logging
import os
import re
import sys
import tempfile
import weakref
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch

from trainer_kit.checkpoint.format.adapters import (
    PROMPT_PREFIX,
    Tensors,
    adapter_config_files,
    adapter_folders,
    base_name,
    frozen_names,
    split_state,
)
from trainer_kit.checkpoint.format.base_files import same_folder
from trainer_kit.checkpoint.format.disk import make_folders, write_file
from trainer_kit.checkpoint.format.json_files import read_json
from trainer_kit.checkpoint.format.manifest import STAGING_PREFIX, list_files
from trainer_kit.checkpoint.format.model_values import split_values, write_values
from trainer_kit.checkpoint.format.pretrained import has_own_format, why_not_pretrained
from trainer_kit.checkpoint.format.safetensors_writer import ToHost, is_file_of, save_tensors
from trainer_kit.errors import CheckpointError
from trainer_kit.utils.pytree import flatten_state
from trainer_kit.utils.transformers_models import is_transformers_model
from trainer_kit.utils.units import join_names
from trainer_kit.utils.wrappers import model_class, without_wrappers

logger = logging.getLogger("trainer_kit")

CONFIG_NAME = "config.json"
_PICKLES = (".bin", ".ckpt", ".pickle", ".pkl", ".pt", ".pth")
_RUST_ERROR = r"\(os error (\d+)\)$"


_warned: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
"""Models for which the warning about the missing configuration was logged."""


def model_files(model: torch.nn.Module, processing_class: Any) -> dict[str, bytes]:
    """Return the same files as `pretrained_files`, with the configurations of adapters in place of the model's."""
    adapters = adapter_config_files(model)
    return adapters | pretrained_files(None if adapters else model, processing_class)


def pretrained_files(model: torch.nn.Module | None, processing_class: Any) -> dict[str, bytes]:
    """Return the files of a model's configuration and of its tokenizer or processor.

    A configuration from which `from_pretrained` would create another model is left out, with a warning in the log.
    Tokenizers are not thread-safe: call this in the thread that uses them.

    Args:
        model: The model, wrapped or not; None: none.
        processing_class: Tokenizer or processor; None or an object without `save_pretrained` adds no files.

    Returns:
        Contents by path in a model's folder, with forward slashes.

    Raises:
        OSError: If the files cannot be written to the folder for temporary files, from which they are read.
    """
    with tempfile.TemporaryDirectory(prefix="trainer_kit-") as folder:
        try:
            _save_pretrained(model, processing_class, Path(folder))
        except OSError:
            raise
        except Exception as error:
            # The tokenizers' own code raises a plain Exception on a full disk: "No space left on device (os error 28)".
            if not (found := re.search(_RUST_ERROR, str(error))):
                raise
            number = int(found[1])
            raise OSError(number, os.strerror(number), folder) from error
        return {path.relative_to(folder).as_posix(): path.read_bytes() for path in list_files(Path(folder))}


def _save_pretrained(model: torch.nn.Module | None, processing_class: Any, directory: Path) -> None:
    model = None if model is None else without_wrappers(model)
    if model is not None and _is_readable(model):
        config: Any = copy.deepcopy(model.config)
        config.architectures = [model_class(model).__name__]
        config.save_pretrained(directory)
        generation_config = getattr(model, "generation_config", None)
        if generation_config is not None and hasattr(generation_config, "save_pretrained"):
            generation_config.save_pretrained(directory)
    if processing_class is not None and hasattr(processing_class, "save_pretrained"):
        processing_class.save_pretrained(directory)


def _is_readable(model: torch.nn.Module) -> bool:
    """Return whether `from_pretrained` can load the model's weights; if not, warn once."""
    reason = why_not_pretrained(model)
    if reason is not None and model not in _warned:
        _warned.add(model)
        logger.warning(
            "weights are written without %s, so that from_pretrained does not load them: %s; load them with "
            "trainer_kit.load_checkpoint_in_model(model, folder)%s",
            CONFIG_NAME,
            reason,
            ", or save the model by its own save_pretrained(folder)" if has_own_format(model) else "",
        )
    return reason is None and is_transformers_model(model)


def _remove_other_configuration(directory: Path) -> None:
    """Remove the transformers configuration of a model whose weights are replaced in this folder."""
    path = directory / CONFIG_NAME
    try:
        content = read_json(path)
    except CheckpointError:
        return  # no configuration, or not one of transformers
    if isinstance(content, dict) and "model_type" in content:
        path.unlink()
        logger.warning("%s was removed: it belonged to the model that %s held before", path, directory)


def save_model_folder(
    directory: Path,
    state: Mapping[str, Any],
    model: torch.nn.Module,
    processing_class: Any,
    max_shard_size: int | str,
    to_host: ToHost = torch.Tensor.cpu,
    uses_own_format: bool = False,
    left_out: Collection[str] | None = None,
) -> None:
    """Write a model's weights, configuration and tokenizer to a folder, replacing each existing file atomically.

    Adapters of PEFT are written as peft does, without the frozen weights below them. The folder that the base was
    loaded from keeps its files.

    Args:
        directory: The folder; created if missing.
        state: The model's `state_dict`.
        model: The model, for its configuration.
        processing_class: Tokenizer or processor; None: none.
        max_shard_size: See `save_tensors`.
        to_host: See `save_tensors`.
        uses_own_format: Whether a model of another library writes its folder by its own `save_pretrained`.
        left_out: Names of the frozen weights that are not written; None: all of them.

    Raises:
        OSError: If the disk is full or cannot be written.
        TypeError: If the model's state holds a value that cannot be kept.
        ValueError: If the folder is that of the base, and the model has further weights to write; or if the model's own
            `save_pretrained` writes a pickle.
    """
    if uses_own_format and has_own_format(without_wrappers(model)) and not adapter_folders(model):
        _save_in_own_format(directory, model, processing_class)
        return
    tensors, values = split_values(state)
    flatten_state(values)  # refuses what cannot be kept before anything is written
    if adapter_folders(model):
        _save_adapters(directory, tensors, model, processing_class, max_shard_size, to_host, left_out)
    else:
        _write_files(directory, model_files(model, processing_class))
        save_tensors(tensors, directory, max_shard_size=max_shard_size, to_host=to_host)
    write_values(directory, values, to_host)


def _write_files(directory: Path, files: Mapping[str, bytes], is_base: bool = False) -> None:
    for name, content in files.items():
        make_folders((directory / name).parent)
        write_file(directory / name, [content])
    if CONFIG_NAME not in files and not is_base:
        _remove_other_configuration(directory)


def _save_adapters(
    directory: Path, state: Tensors, model: torch.nn.Module, processing_class: Any, max_shard_size: int | str,
    to_host: ToHost, left_out: Collection[str] | None,
) -> None:  # fmt: skip
    """Write a model with adapters; in the folder of its base, nothing that replaces the base."""
    rest, adapters = split_state(model, state, {*(frozen_names(model) if left_out is None else left_out)})
    is_base = same_folder(base_name(model), directory)
    if is_base and rest:
        raise ValueError(
            f"{directory} holds the base of the model, whose weights would be replaced by "
            f"{join_names(map(repr, rest))}, which no adapter holds; save the model to another folder"
        )
    _write_files(directory, model_files(model, processing_class), is_base)
    for path in [path for path in directory.iterdir() if is_file_of(path.name, "model") and not is_base]:
        path.unlink()
    for stem, tensors in adapters.items():
        path = directory / stem
        save_tensors(tensors, path.parent, path.name, sys.maxsize, to_host)
    if rest:
        _warn_of_further(directory, rest)
        save_tensors(rest, directory, max_shard_size=max_shard_size, to_host=to_host)


def _save_in_own_format(directory: Path, model: torch.nn.Module, processing_class: Any) -> None:
    own: Any = without_wrappers(model)
    make_folders(directory)
    with tempfile.TemporaryDirectory(prefix=STAGING_PREFIX, dir=directory) as temporary:
        _save_pretrained(None, processing_class, Path(temporary))
        own.save_pretrained(temporary)
        files = {path.relative_to(temporary): path for path in list_files(Path(temporary))}
        if pickles := [str(name) for name in files if name.suffix in _PICKLES]:
            raise ValueError(
                f"{model_class(model).__name__}.save_pretrained writes {join_names(pickles)}, which holds a pickle; "
                "save the model by its own method, or its weights alone with save_file of safetensors"
            )
        for name, path in files.items():
            make_folders((directory / name).parent)
            write_file(directory / name, [path.read_bytes()])


def _warn_of_further(directory: Path, state: Tensors) -> None:
    """Warn of tensors beyond those of adapters, which peft does not load."""
    if beyond := [name for name in state if not name.startswith(PROMPT_PREFIX)]:
        logger.warning(
            "%s holds %s, which no adapter holds and peft does not load: load them with "
            "trainer_kit.load_checkpoint_in_model(model, folder), or name their modules in modules_to_save",
            directory / "model.safetensors",
            join_names(map(repr, beyond)),
        )


def refuse_pickles(safe_serialization: bool) -> None:
    """Raise a ValueError unless safetensors are to be written."""
    if not safe_serialization:
        raise ValueError("safe_serialization=False would write a pickle; only safetensors are written")
