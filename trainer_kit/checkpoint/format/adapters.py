"""Adapters of PEFT: their tensors in a model, in the files and under the names that peft and transformers read."""

from __future__ import annotations

import copy
import sys
import tempfile
import weakref
from collections.abc import Collection, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import torch

from trainer_kit.checkpoint.format.manifest import STATE_FOLDER
from trainer_kit.checkpoint.format.model_values import split_values
from trainer_kit.checkpoint.format.safetensors_reader import Source
from trainer_kit.checkpoint.format.safetensors_writer import storage_key
from trainer_kit.utils.module_modes import evaluating
from trainer_kit.utils.rng import generators_kept
from trainer_kit.utils.transformers_models import is_transformers_model, loaded_from
from trainer_kit.utils.wrappers import without_adapters, without_wrappers, without_wrappers_and_adapters

Tensors = Mapping[str, torch.Tensor]

CONFIG_NAME = "adapter_config.json"
WEIGHTS_STEM = "adapter_model"
"""Stem of an adapter's file, which is one file of any size, as peft reads it."""

PROMPT_PREFIX = "prompt_encoder."
"""Prefix of the names of prompt encoders, from whose weights peft computes what it saves."""

_TRANSFORMERS_PREFIX = "base_model.model."
"""Prefix of the names in an adapter's file, which transformers adds to those of its own models."""

_embeddings: weakref.WeakKeyDictionary[torch.nn.Module, dict[str, bool]] = weakref.WeakKeyDictionary()
"""By model and adapter: whether peft saves the embedding layers with the adapter, which it may look up on the Hub."""


def adapter_folders(model: torch.nn.Module) -> dict[str, str]:
    """Return the folder of each adapter of a model, relative to the model's, by the adapter's name.

    The folder is "" for the adapter "default", as peft and transformers have it, and for a transformers model's only
    one. The dict is empty for a model that is no `peft.PeftModel` and has no adapter from `add_adapter`.

    Args:
        model: The model, wrapped or not.

    Raises:
        ValueError: If an adapter's name is that of the folder of states.
    """
    model = without_wrappers(model)
    names = [*_configs(model)]
    if STATE_FOLDER in names:
        raise ValueError(f"an adapter is named {STATE_FOLDER!r}, as a folder of each checkpoint is; rename it")
    is_only_one = len(names) == 1 and is_transformers_model(model)
    return {name: "" if name == "default" or is_only_one else name for name in names}


def _configs(model: Any) -> dict[str, Any]:
    kind = getattr(sys.modules.get("peft"), "PeftModel", None)  # imported already if the model has adapters
    has_adapters = kind is not None and (
        isinstance(model, kind) or (is_transformers_model(model) and getattr(model, "_hf_peft_config_loaded", False))
    )
    return dict(model.peft_config) if has_adapters else {}


def adapter_stems(model: torch.nn.Module) -> dict[str, str]:
    """Return the stem of the file of each adapter of a model, by the adapter's name."""
    return {name: str(PurePosixPath(folder, WEIGHTS_STEM)) for name, folder in adapter_folders(model).items()}


def adapter_tensors(model: torch.nn.Module, state: Tensors) -> dict[str, Tensors]:
    """Return the tensors of each adapter's file by its stem: under peft's names, then under those in the model.

    The second names become aliases in the file, by which `load_weights` reads it. A tensor that peft computes has none.

    Args:
        model: The model, wrapped or not.
        state: All tensors of the model by name.
    """
    own_names: dict[Any, list[str]] = {}
    for name, tensor in state.items():
        own_names.setdefault(storage_key(tensor), []).append(name)
    files: dict[str, Tensors] = {}
    for adapter, stem in adapter_stems(model).items():
        tensors: dict[str, torch.Tensor] = {}
        aliases: dict[str, torch.Tensor] = {}
        for name, tensor in _peft_state(without_wrappers(model), state, adapter).items():
            is_tied = any(aliases.get(own) is not None for own in own_names.get(storage_key(tensor), ()))
            tensors[name] = tensor.detach().clone() if is_tied else tensor  # peft reads each name from the file
            if not is_tied:
                aliases |= dict.fromkeys(own_names.get(storage_key(tensor), ()), tensor)
        files[stem] = tensors | {name: tensor for name, tensor in aliases.items() if name not in tensors}
    return files


def split_state(
    model: torch.nn.Module, state: Tensors, base: set[str]
) -> tuple[dict[str, torch.Tensor], dict[str, Tensors]]:
    """Return the entries of a model's state that neither its adapters' files nor `base` have, and those files."""
    tensors, _ = split_values(state)
    files = adapter_tensors(model, tensors)
    absent = base | _held_names(files, tensors)
    return {name: tensor for name, tensor in state.items() if name not in absent}, files


def frozen_names(model: torch.nn.Module) -> set[str]:
    """Return the names of the parameters below a model's adapters that are not trained, and of their quantization."""
    state, _ = split_values(without_wrappers(model).state_dict(keep_vars=True))
    held = _held_names(adapter_tensors(model, state), state)
    frozen = {
        name
        for name, value in state.items()
        if isinstance(value, torch.nn.Parameter) and not value.requires_grad and name not in held
    }
    # bitsandbytes names the scales of a weight "weight.absmax".
    return frozen | {name for name in state if any(name[:end] in frozen for end in _dots(name))}


def _dots(name: str) -> list[int]:
    return [index for index, character in enumerate(name) if character == "."]


def _held_names(files: Mapping[str, Tensors], state: Tensors) -> set[str]:
    """Return the names of the model's tensors that `adapter_tensors` put into files."""
    return {
        name
        for tensors in files.values()
        for name, tensor in tensors.items()
        if name in state and storage_key(state[name]) == storage_key(tensor)
    }


def _peft_state(model: Any, state: Tensors, adapter: str) -> dict[str, torch.Tensor]:
    import peft

    # A prompt encoder is called, which may have dropout.
    with torch.no_grad(), generators_kept(next(iter(state.values())).device), evaluating(model):
        found = peft.get_peft_model_state_dict(
            model, dict(state), adapter, save_embedding_layers=_saves_embeddings(model, state, adapter)
        )
    prefix = _TRANSFORMERS_PREFIX if is_transformers_model(model) else ""
    return {f"{prefix}{name}": tensor for name, tensor in found.items() if isinstance(tensor, torch.Tensor)}


def _saves_embeddings(model: Any, state: Tensors, adapter: str) -> bool:
    """Return whether peft saves the embedding layers too, because an adapter changes them or they were resized."""
    import peft

    known = _embeddings.setdefault(model, {})
    if adapter not in known:
        auto, plain = (
            peft.get_peft_model_state_dict(model, dict(state), adapter, save_embedding_layers=choice)
            for choice in ("auto", False)
        )
        known[adapter] = auto.keys() != plain.keys()
    return known[adapter]


def adapter_config_files(model: torch.nn.Module) -> dict[str, bytes]:
    """Return the `adapter_config.json` of each adapter of a model, by path relative to the model's folder.

    Raises:
        OSError: If the files cannot be written to the folder for temporary files, from which they are read.
    """
    model, files = without_wrappers(model), {}
    configs = _configs(model)
    for name, folder in adapter_folders(model).items():
        config, mapping = _saved_config(model, configs[name])
        with tempfile.TemporaryDirectory(prefix="trainer_kit-") as temporary:
            config.save_pretrained(temporary, auto_mapping_dict=mapping)
            files[str(PurePosixPath(folder, CONFIG_NAME))] = (Path(temporary) / CONFIG_NAME).read_bytes()
    return files


def _saved_config(model: Any, config: Any) -> tuple[Any, dict[str, str] | None]:
    """Return a copy of an adapter's configuration as peft saves it, and the base's class if peft needs it."""
    config, mapping = copy.copy(config), None
    config.inference_mode = True
    config.base_model_name_or_path = base_name(model)
    for field, value in vars(config).items():
        if isinstance(value, set):  # in the same order in each process
            setattr(config, field, sorted(value))
    if config.task_type is None:
        kind = type(without_adapters(model))
        mapping = {"base_model_class": kind.__name__, "parent_library": kind.__module__}
    return config, mapping


def base_name(model: torch.nn.Module) -> str | None:
    """Return the name or folder from which the base of a model with adapters was loaded; None if it is not known."""
    inner = without_wrappers(model)
    configured = [config.base_model_name_or_path for config in _configs(inner).values()]
    names = (loaded_from(without_adapters(inner)), *configured)
    return next((name for name in names if isinstance(name, str) and name), None)


def base_commit(model: torch.nn.Module) -> str | None:
    """Return the commit of the Hub's repository from which the base of a model with adapters was loaded, if known."""
    commit = getattr(getattr(without_wrappers_and_adapters(model), "config", None), "_commit_hash", None)
    return commit if isinstance(commit, str) else None


def with_model_names(source: Source, names: Collection[str]) -> Source:
    """Return the tensors of an adapter's file under their names in the model, without those that peft computed.

    Args:
        source: The file.
        names: Names of the model's tensors, of which some have the same name in peft's files.
    """
    entries, aliases = {}, dict[str, str]()
    for stored, entry in source.entries.items():
        if own := [alias for alias, target in source.aliases.items() if target == stored] or [stored] * (
            stored in names
        ):
            entries[own[0]] = entry
            aliases |= dict.fromkeys(own[1:], own[0])
    return Source(source.path, entries, aliases)
