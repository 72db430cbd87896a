"""A model for use: weights and the files that transformers' `from_pretrained` wants beside them."""

from __future__ import annotations

import copy
import os
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from trainer_kit.checkpoint.disk import make_folders, write_file
from trainer_kit.checkpoint.format import list_files
from trainer_kit.checkpoint.shards import ToHost, save_tensors

_RUST_ERROR = re.compile(r"\(os error (\d+)\)$")


def pretrained_files(model: torch.nn.Module, processing_class: Any) -> dict[str, bytes]:
    """The configuration and the tokenizer's or processor's files, where there are any.

    Tokenizers are no safe thing to use in two threads at a time: call this where they are used.

    Returns:
        Their contents by their path in a model's folder, with forward slashes.

    Raises:
        OSError: If they cannot be written to the folder for temporary files, from which their contents are taken.
    """
    with tempfile.TemporaryDirectory(prefix="trainer_kit-") as folder:
        try:
            _save_pretrained(model, processing_class, Path(folder))
        except OSError:
            raise
        except Exception as error:
            # The tokenizers' own code raises a plain Exception on a full disk: "No space left on device (os error 28)".
            if not (found := _RUST_ERROR.search(str(error))):
                raise
            number = int(found[1])
            raise OSError(number, os.strerror(number), folder) from error
        return {path.relative_to(folder).as_posix(): path.read_bytes() for path in list_files(Path(folder))}


def _save_pretrained(model: torch.nn.Module, processing_class: Any, directory: Path) -> None:
    config = getattr(model, "config", None)
    if config is not None and hasattr(config, "save_pretrained"):
        config = copy.deepcopy(config)
        config.architectures = [type(model).__name__]
        config.save_pretrained(directory)
        generation_config = getattr(model, "generation_config", None)
        if generation_config is not None and hasattr(generation_config, "save_pretrained"):
            generation_config.save_pretrained(directory)
    if processing_class is not None and hasattr(processing_class, "save_pretrained"):
        processing_class.save_pretrained(directory)


def save_model_folder(
    directory: Path,
    state: Mapping[str, torch.Tensor],
    model: torch.nn.Module,
    processing_class: Any,
    max_shard_size: int | str,
    to_host: ToHost = torch.Tensor.cpu,
) -> None:
    """Writes a model folder; each file of a model that is there already is replaced once the new one is whole."""
    files = pretrained_files(model, processing_class)
    for name, content in files.items():
        make_folders((directory / name).parent)
        write_file(directory / name, [content])
    save_tensors(state, directory, max_shard_size=max_shard_size, to_host=to_host)
