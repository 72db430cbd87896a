"""Files that the base of a model with adapters was loaded from: a local folder, or the Hub's cache."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from trainer_kit.checkpoint.format.base_reference import BaseReference, digest
from trainer_kit.checkpoint.format.safetensors_reader import load_tensor, read_header
from trainer_kit.errors import CheckpointError

logger = logging.getLogger("trainer_kit")


def is_local(name: str) -> bool:
    """Return whether a base comes from a folder on this machine, which may change or be removed."""
    return Path(name).exists()


def digests_in_files(name: str, commit: str | None, dtypes: Collection[torch.dtype]) -> set[str]:
    """Return the digests of all tensors in the files of a base, in each of these dtypes; empty without files."""
    return {each for each, _ in _tensors_in_files(name, commit, dtypes)}


def load_from_hub(reference: BaseReference, names: Collection[str]) -> dict[str, torch.Tensor]:
    """Return those of the named weights of a base that its files in the Hub's cache hold, with the same bits."""
    if reference.name is None or not names or is_local(reference.name):
        return {}
    wanted: dict[str, list[str]] = {}
    for each in names:
        wanted.setdefault(reference.digests[each], []).append(each)
    dtypes = {_dtype(reference.dtypes[each]) for each in names}
    found = _tensors_in_files(reference.name, reference.commit, dtypes)
    return {each: tensor for key, tensor in found for each in wanted.get(key, ())}


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise CheckpointError(f"the reference to the frozen weights is damaged: {name!r:.50} is no dtype")
    return found


def _tensors_in_files(
    name: str, commit: str | None, dtypes: Collection[torch.dtype]
) -> Iterator[tuple[str, torch.Tensor]]:
    folder = Path(name) if is_local(name) else _snapshot(name, commit)
    for path in () if folder is None else sorted(folder.glob("*.safetensors")):
        try:
            source = read_header(path)
            for each in source.entries:
                tensor = load_tensor(source, each)
                for dtype in dtypes if not tensor.is_complex() else ():
                    cast = tensor.to(dtype)
                    yield digest(cast), cast
        except CheckpointError as error:
            logger.warning("%s is not used as the base's file: %s", path, error)


def _snapshot(name: str, commit: str | None) -> Path | None:
    """Return the folder of a repository in the Hub's cache; None if it is not there."""
    hub: Any = sys.modules.get("huggingface_hub")  # imported already if the base comes from the Hub
    for file in ("config.json", "model.safetensors") if hub is not None else ():
        with contextlib.suppress(ValueError):  # the name of a folder that is gone
            path = hub.try_to_load_from_cache(name, file, revision=commit)
            if isinstance(path, str):
                return Path(path).parent
    return None


def same_folder(name: str | None, directory: Path) -> bool:
    """Return whether a base comes from this folder."""
    return name is not None and is_local(name) and Path(name).resolve() == directory.resolve()


def described(reference: BaseReference) -> str:
    """Return the name of a base with its commit, for messages."""
    return f"{reference.name!r}" + (f" (commit {reference.commit})" if reference.commit else "")


def differing(reference: BaseReference, names: Collection[str], state: Mapping[str, torch.Tensor]) -> list[str]:
    """Return the names of tensors for a message, with the two dtypes where they differ."""
    return [
        repr(each)
        if str(state[each].dtype) == reference.dtypes[each]
        else f"{each!r} ({reference.dtypes[each]} there, {state[each].dtype} in the model)"
        for each in names
    ]
