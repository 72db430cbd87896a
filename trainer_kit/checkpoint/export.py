"""A model for use: weights and the files that transformers' `from_pretrained` wants beside them."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from trainer_kit.checkpoint.shards import ToHost, save_tensors


def save_pretrained_files(model: torch.nn.Module, processing_class: Any, directory: Path) -> None:
    """Writes the configuration and the tokenizer's or processor's files, where there are any."""
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
    directory.mkdir(parents=True, exist_ok=True)
    save_pretrained_files(model, processing_class, directory)
    save_tensors(state, directory, max_shard_size=max_shard_size, to_host=to_host)
