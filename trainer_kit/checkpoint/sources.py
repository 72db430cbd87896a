"""Reading tensors from safetensors files, and the index that leads to several of them."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from trainer_kit.checkpoint.files import CheckpointError, inside, read_json
from trainer_kit.checkpoint.shards import COMPLEX, RESERVED


def load_tensors(directory: Path, stem: str = "model", device: torch.device | str = "cpu") -> dict[str, torch.Tensor]:
    """Loads what `save_tensors` or the Hub's tools saved; tied names share one tensor.

    Raises:
        CheckpointError: If files are missing or damaged, or an index names files outside `directory`.
    """
    loaded: dict[str, torch.Tensor] = {}
    for source in sources(directory, stem):
        loaded.update(load_source(source, str(device)))
    return loaded


@dataclasses.dataclass(frozen=True)
class Source:
    """One safetensors file: the names of its tensors with their shapes, and its aliases as {name: stored name}."""

    path: Path
    shapes: Mapping[str, tuple[int, ...]]
    aliases: Mapping[str, str]
    complex_names: frozenset[str]


def sources(directory: Path, stem: str) -> list[Source]:
    """The files under `stem` in `directory`, their headers read and compared with the index.

    Raises:
        CheckpointError: If there are none, or one is missing or damaged.
    """
    single = inside(directory, f"{stem}.safetensors")
    if single.exists():
        return [read_header(single)]
    index = inside(directory, f"{stem}.safetensors.index.json")
    if not index.exists():
        there = sorted(path.name for path in directory.glob("*") if path.suffix in (".safetensors", ".bin", ".pt"))
        hint = f"; it holds {', '.join(there[:3])}" if there else ""
        raise CheckpointError(f"{directory} has neither {single.name} nor {index.name}{hint}")
    content = read_json(index)
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict):
        raise CheckpointError(f"{index} is damaged: it has no weight_map")
    found = {name: read_header(inside(directory, name)) for name in dict.fromkeys(weight_map.values())}
    for tensor, name in weight_map.items():
        if tensor not in found[name].shapes and tensor not in found[name].aliases:
            raise CheckpointError(f"{index} says that {tensor!r} is in {name}, which does not hold it")
    return list(found.values())


def read_header(path: Path) -> Source:
    """What a safetensors file holds, without reading the tensors.

    Raises:
        CheckpointError: If the file is missing or damaged.
    """
    with _opened(path, "cpu") as file:
        metadata = file.metadata() or {}
        names = file.keys()
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in names}
        complex_names = frozenset(json.loads(metadata.get(COMPLEX, "[]"))) & shapes.keys()
    for name in complex_names:
        shapes[name] = shapes[name][:-1]
    aliases = {
        alias: target
        for alias, target in metadata.items()
        if target in shapes and alias not in shapes and alias not in RESERVED
    }
    return Source(path, shapes, aliases, complex_names)


def load_source(source: Source, device: str) -> dict[str, torch.Tensor]:
    """The tensors of one file, under their stored names and their aliases.

    Raises:
        CheckpointError: If the file is damaged.
    """
    loaded = {}
    with _opened(source.path, device) as file:
        for name in source.shapes:
            # A copy lies in memory of its own, aligned as torch's kernels like it, not in a mapping of the file.
            tensor = file.get_tensor(name).clone()
            loaded[name] = torch.view_as_complex(tensor) if name in source.complex_names else tensor
    loaded.update({alias: loaded[target] for alias, target in source.aliases.items()})
    return loaded


@contextlib.contextmanager
def _opened(path: Path, device: str) -> Iterator[Any]:
    if not path.is_file():
        raise CheckpointError(f"{path} is missing")
    try:
        with safe_open(path, framework="pt", device=device) as file:
            yield file
    except (SafetensorError, OSError, ValueError, TypeError) as error:
        raise CheckpointError(f"{path} is damaged or no safetensors file: {error}") from error
