"""Comparison of two checkpoints: their tensors, one at a time, and all other content."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from trainer_kit.checkpoint.format.discovery import verify
from trainer_kit.checkpoint.format.json_files import inside, read_json
from trainer_kit.checkpoint.format.manifest import ARGUMENTS_NAME, STATE_FOLDER, Manifest
from trainer_kit.checkpoint.format.safetensors_reader import Source, load_tensor, sources
from trainer_kit.errors import CheckpointError
from trainer_kit.utils.pytree import plain_values
from trainer_kit.utils.vectors import as_bytes

_OF_TENSORS = re.compile(r"(.+?)(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")
_PIECE = 2**22  # elements of a tensor compared at a time


@dataclasses.dataclass(frozen=True)
class TensorDifference:
    """Difference of a tensor between checkpoints A and B; elements that are NaN in one of them are left out.

    Attributes:
        name: File and name of the tensor, such as "state/optimizer: state.0.exp_avg".
        elements: Number of elements.
        differing: Number of elements whose bits differ.
        largest: Largest absolute difference of two elements.
        relative: `largest` divided by the largest finite absolute value in both.
        nans: Number of NaN elements in A and in B.
    """

    name: str
    elements: int
    differing: int
    largest: float
    relative: float
    nans: tuple[int, int]


@dataclasses.dataclass
class Comparison:
    """Differences between two checkpoints A and B.

    Attributes:
        manifests: The manifests of A and B.
        tensors: Number of tensors in both.
        differing: Tensors whose values differ: those with another number of NaNs first, then by relative difference.
        changed: Dtype and shape in A and B of tensors in which these differ, by name.
        values: Differing plain values of states and arguments in A and B, by file and place.
        files: Further files (a configuration, a tokenizer) whose content differs.
        only_in: Files, tensors and values that only A has, and those that only B has.
    """

    manifests: tuple[Manifest, Manifest]
    tensors: int = 0
    differing: list[TensorDifference] = dataclasses.field(default_factory=list)
    changed: dict[str, tuple[str, str]] = dataclasses.field(default_factory=dict)
    values: dict[str, tuple[Any, Any]] = dataclasses.field(default_factory=dict)
    files: list[str] = dataclasses.field(default_factory=list)
    only_in: tuple[list[str], list[str]] = dataclasses.field(default_factory=lambda: ([], []))

    @property
    def is_equal(self) -> bool:
        """Whether the content is equal; time, number of processes and versions in the manifests may differ."""
        return not (self.differing or self.changed or self.values or self.files or any(self.only_in))


def compare(a: Path, b: Path) -> Comparison:
    """Compare two valid checkpoints; needs memory for the largest tensor of each.

    Numbers are compared by their bits: 0.0 differs from -0.0 (by 0), and a NaN equals itself.

    Args:
        a: Folder of checkpoint A.
        b: Folder of checkpoint B.

    Raises:
        CheckpointError: If one of them is damaged.
    """
    found = Comparison((verify(a), verify(b)))
    files = [manifest.files for manifest in found.manifests]
    for stem in _in_both(found, map(_stems, files), label="{}.safetensors"):
        _compare_tensors(found, a, b, stem)
    for name in _in_both(found, ([name for name in each if not _OF_TENSORS.fullmatch(name)] for each in files)):
        if name == ARGUMENTS_NAME or name.startswith(f"{STATE_FOLDER}/"):
            _compare_values(found, a, b, name)
        elif files[0][name] != files[1][name]:
            found.files.append(name)
    found.differing.sort(key=lambda each: (each.nans[0] == each.nans[1], -each.relative))
    return found


def _in_both(found: Comparison, names: Iterable[Iterable[str]], label: str = "{}") -> list[str]:
    """Return the names in both A and B, in A's order; add the others to `found.only_in`."""
    in_a, in_b = (dict.fromkeys(each) for each in names)
    found.only_in[0].extend(label.format(name) for name in in_a if name not in in_b)
    found.only_in[1].extend(label.format(name) for name in in_b if name not in in_a)
    return [name for name in in_a if name in in_b]


def _stems(files: Iterable[str]) -> list[str]:
    """Return the stems of tensor files: "model" for `model.safetensors` and for its shards with their index."""
    matches = [_OF_TENSORS.fullmatch(name) for name in files]
    return list(dict.fromkeys(match[1] for match in matches if match))


def _compare_tensors(found: Comparison, a: Path, b: Path, stem: str) -> None:
    manifests = found.manifests
    ours, theirs = (_places(each, stem, manifest) for each, manifest in zip((a, b), manifests, strict=True))
    names = _in_both(found, (ours, theirs), label=f"{stem}: {{}}")
    tied = {name for name in names if name in ours[name].aliases and name in theirs[name].aliases}
    for name in names:
        if name in tied:
            continue
        found.tensors += 1
        label, one, other = f"{stem}: {name}", load_tensor(ours[name], name), load_tensor(theirs[name], name)
        if (kind := _kind(one)) != (other_kind := _kind(other)):
            found.changed[label] = (kind, other_kind)
        elif not torch.equal(_bits(one), _bits(other)):
            found.differing.append(_measure(label, one, other))


def _places(directory: Path, stem: str, manifest: Manifest) -> dict[str, Source]:
    """Return the file of each tensor by its name, aliases included."""
    return {name: source for source in sources(directory, stem, manifest.files) for name in source.shapes}


def _kind(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of each element, in rows."""
    return as_bytes(tensor).view(tensor.numel(), tensor.element_size())


def _measure(name: str, a: torch.Tensor, b: torch.Tensor) -> TensorDifference:
    """Measure a tensor's difference piece by piece, which bounds the memory of float64 copies."""
    differing, largest, scale, nans = 0, 0.0, 0.0, [0, 0]
    for pair in zip(a.reshape(-1).split(_PIECE), b.reshape(-1).split(_PIECE), strict=True):
        wide = [piece.to(torch.complex128 if piece.is_complex() else torch.float64) for piece in pair]
        sizes = [piece.abs() for piece in wide]
        differing += int((_bits(pair[0]) != _bits(pair[1])).any(dim=1).sum())
        largest = max(largest, _largest((wide[0] - wide[1]).abs()))
        scale = max(scale, *(_largest(size[size.isfinite()]) for size in sizes))
        nans = [count + int(size.isnan().sum()) for count, size in zip(nans, sizes, strict=True)]
    relative = largest / scale if scale else largest
    return TensorDifference(name, a.numel(), differing, largest, relative, (nans[0], nans[1]))


def _largest(sizes: torch.Tensor) -> float:
    sizes = sizes[~sizes.isnan()]
    return sizes.max().item() if sizes.numel() else 0.0


def _compare_values(found: Comparison, a: Path, b: Path, name: str) -> None:
    ours, theirs = (_values(directory, name) for directory in (a, b))
    for place in _in_both(found, (ours, theirs)):
        if repr(ours[place]) != repr(theirs[place]):  # as text, NaN equals itself and 1 differs from 1.0
            found.values[place] = (ours[place], theirs[place])


def _values(directory: Path, name: str) -> dict[str, Any]:
    """Return the plain values in the JSON file of a state, by the file's name and their place."""
    path, label = inside(directory, name), name.removesuffix(".json")
    tree = read_json(path)
    try:
        return {f"{label}: {place}" if place else label: value for place, value in plain_values(tree)}
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error
