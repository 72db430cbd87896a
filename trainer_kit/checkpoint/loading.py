"""Loading saved weights into a model, in place."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from trainer_kit.checkpoint.files import CheckpointError
from trainer_kit.checkpoint.format import MANIFEST_NAME, Manifest
from trainer_kit.checkpoint.shards import storage_key
from trainer_kit.checkpoint.sources import Source, load_source, read_header, sources

_SHOWN = 3


def load_checkpoint_in_model(
    model: torch.nn.Module, checkpoint: str | os.PathLike[str], strict: bool = True, stem: str = "model"
) -> None:
    """Loads weights into a model, in place and file by file: the host needs memory for the largest file.

    Names and shapes are compared before anything is written. Weights are cast to the model's dtypes, tied ones stay
    tied; a name missing from the files is no error where the model ties it to one that is there.

    Args:
        model: On any device.
        checkpoint: A checkpoint of trainer_kit (whose weights are then compared with their checksums), a folder that
            `save_model` or `save_pretrained` wrote, or one `.safetensors` file.
        strict: Whether names that only the model or only the files have are an error.
        stem: How the names of the files in a folder begin.

    Raises:
        CheckpointError: If files are missing or damaged.
        ValueError: If the weights are of another model, naming the first tensors that differ.
    """
    found = _find(Path(checkpoint), stem)
    state = {name: value for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}
    _compare(state, _shapes(found), Path(checkpoint), type(model).__name__, strict)
    for source in found:
        model.load_state_dict(load_source(source, "cpu"), strict=False)


def _find(checkpoint: Path, stem: str) -> list[Source]:
    if checkpoint.is_file():
        if checkpoint.suffix != ".safetensors":
            raise CheckpointError(f"{checkpoint} is no .safetensors file; files that are pickles are never read")
        return [read_header(checkpoint)]
    if not checkpoint.is_dir():
        raise CheckpointError(f"{checkpoint} does not exist")
    found = sources(checkpoint, stem)
    if (checkpoint / MANIFEST_NAME).exists():
        manifest = Manifest.read(checkpoint)
        manifest.check(checkpoint, [source.path.name for source in found if source.path.name in manifest.files])
    return found


def _shapes(found: list[Source]) -> dict[str, tuple[int, ...]]:
    """Shapes of all tensors in the files, under their stored names and their aliases."""
    shapes: dict[str, tuple[int, ...]] = {}
    for source in found:
        shapes.update(source.shapes)
        shapes.update({alias: source.shapes[target] for alias, target in source.aliases.items()})
    return shapes


def _compare(
    state: Mapping[str, torch.Tensor],
    shapes: Mapping[str, tuple[int, ...]],
    checkpoint: Path,
    model_name: str,
    strict: bool,
) -> None:
    present = {storage_key(tensor) for name, tensor in state.items() if name in shapes}
    missing = [name for name, tensor in state.items() if name not in shapes and storage_key(tensor) not in present]
    unexpected = [name for name in shapes if name not in state]
    other = [
        f"{name!r} is of shape {list(shapes[name])} there and {list(tensor.shape)} in the model"
        for name, tensor in state.items()
        if name in shapes and tuple(tensor.shape) != shapes[name]
    ]
    problems = [_list("of other shape: ", other)]
    if strict:
        problems += [_list("missing there: ", map(repr, missing)), _list("not in the model: ", map(repr, unexpected))]
    if any(problems):
        reasons = "; ".join(problem for problem in problems if problem)
        raise ValueError(f"{checkpoint} holds the weights of another model than this {model_name}: {reasons}")


def _list(title: str, items: Any) -> str:
    """The first few items and how many more there are; nothing where there are none."""
    items = list(items)
    more = f" and {len(items) - _SHOWN} more" if len(items) > _SHOWN else ""
    return f"{title}{', '.join(items[:_SHOWN])}{more}" if items else ""
