"""Marks: short texts that are equal if two starts of a script hold the same bits."""

from __future__ import annotations

import json
import random
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from types import FunctionType
from typing import Any

import numpy as np
import torch
import xxhash
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from trainer_kit.utils.vectors import as_bytes

GENERATOR = "generator "
"""Prefix of a random generator's mark."""

_PLAIN = (bool, int, str, bytes, type(None), complex, np.generic, torch.dtype, torch.device, range, slice)
_MOST_TEXT = 100
_MOST_ITEMS = 200
_MOST_BYTES = 2**20
_OF_A_MODULE = frozenset(vars(torch.nn.Module()))


def marks(tree: Any, name: str = "") -> dict[str, str]:
    """Return the mark of every leaf in nested dicts, lists and tuples, by path, without leaves of unknown content.

    Args:
        tree: A batch or a state.
        name: Prefix of the paths.
    """
    found = {}
    for place, value in leaves(tree, name):
        if (mark := mark_of(value)) is not None:
            found[place] = mark
    return found


def state_marks(json_tree: Any, tensors: Mapping[str, torch.Tensor], name: str) -> dict[str, str]:
    """Return the marks of a checkpointed state: one per entry, and one per tensor.

    Args:
        json_tree: JSON part of the state, from `flatten_state`.
        tensors: Tensors of the state, from `flatten_state`.
        name: Prefix of the names.
    """
    has_entries = isinstance(json_tree, dict) and json_tree
    entries = {f"{name}.{key}": value for key, value in json_tree.items()} if has_entries else {name: json_tree}
    found = {place: _shortened(json.dumps(value, sort_keys=True)) for place, value in entries.items()}
    for key, tensor in tensors.items():
        place = f"{name}.{key}"  # an entry that is itself a tensor has the same name
        found[place] = f"{found.get(place, '')} {mark_of(tensor)}".lstrip()
    return found


def leaves(tree: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield path and value of every leaf in nested dicts, lists and tuples."""
    if isinstance(tree, Mapping):
        items: Iterable[tuple[Any, Any]] = tree.items()
    elif isinstance(tree, (list, tuple)):
        items = enumerate(tree)
    else:
        yield name, tree
        return
    for key, value in items:
        yield from leaves(value, f"{name}.{key}" if name else str(key))


def mark_of(value: Any) -> str | None:
    """Return the mark of one value; None for an object of unknown content."""
    if isinstance(value, torch.Tensor):
        parts = [_checksum(tensor_bytes(part)) for part in parts_of(value)]
        return f"{str(value.dtype).removeprefix('torch.')}{[*value.shape]} {' '.join(parts)}"
    if isinstance(value, np.ndarray):
        return f"{value.dtype}{[*value.shape]} {_checksum(value.tobytes())}"
    if (state := _generator_state(value)) is not None:
        kind = type(value)
        return f"{GENERATOR}{kind.__module__}.{kind.__qualname__} {_checksum(repr(state).encode())}"
    if isinstance(value, float):
        return f"{value!r} {value.hex()}"
    if isinstance(value, _PLAIN):
        return _shortened(repr(value))
    return None


def _shortened(text: str) -> str:
    return text if len(text) <= _MOST_TEXT else f"{text[:_MOST_TEXT]}… {_checksum(text.encode())}"


def parts_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the plain tensors that hold a tensor here, such as this process's part of a sharded one."""
    if not is_traceable_wrapper_subclass(tensor):
        return [tensor]
    held = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
    return [part for each in held if isinstance(each, torch.Tensor) for part in parts_of(each)]


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """Return a plain tensor's bytes on the host."""
    tensor = tensor.detach()
    dense = tensor if tensor.layout == torch.strided else tensor.to_dense()
    host = dense.resolve_conj().resolve_neg().cpu()
    return as_bytes(host).numpy().data


def _checksum(data: bytes | memoryview) -> str:
    return xxhash.xxh3_64_hexdigest(data)


def _generator_state(value: Any) -> Any:
    if isinstance(value, torch.Generator):
        return value.get_state().tolist()
    if isinstance(value, np.random.Generator):
        return value.bit_generator.state
    if isinstance(value, np.random.RandomState):
        return [part.tolist() if isinstance(part, np.ndarray) else part for part in value.get_state(legacy=True)]
    # SystemRandom has no state.
    if isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):
        return value.getstate()
    return None


def sample_marks(batch: Any) -> list[str]:
    """Return one mark per sample, from its rows in all tensors with the batch's number of rows."""
    columns = [value for _, value in leaves(batch) if isinstance(value, torch.Tensor) and value.dim()]
    columns = [column for column in columns if len(column) == len(columns[0])]
    checksums = [xxhash.xxh3_64() for _ in range(len(columns[0]) if columns else 0)]
    for column in columns:
        for checksum, row in zip(checksums, column.detach().cpu(), strict=True):
            checksum.update(tensor_bytes(row))
    return [checksum.hexdigest() for checksum in checksums]


def attributes(owner: Any) -> dict[str, str]:
    """Return marks of an object's attributes outside of checkpoints: plain values, small tensors, generators.

    The attributes of a function include its closure.

    Args:
        owner: Object or function.
    """
    if isinstance(owner, FunctionType):
        cells = zip(owner.__code__.co_freevars, owner.__closure__ or (), strict=True)
        held = {**vars(owner), **{name: _content(cell) for name, cell in cells}}
    else:
        held = getattr(owner, "__dict__", {})
    left_out = _OF_A_MODULE if isinstance(owner, torch.nn.Module) else frozenset()
    found = {}
    for name, value in held.items():
        if name not in left_out and not name.startswith("__") and (mark := _held_mark(value)) is not None:
            found[name] = mark
    return found


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # the cell is empty
        return object()


def _held_mark(value: Any) -> str | None:
    """Return the mark of an attribute, by a cheap method, since there are many in every step."""
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return mark_of(value) if value.nbytes <= _MOST_BYTES else None
    if not isinstance(value, (dict, list, tuple, deque, set, frozenset)):
        return mark_of(value)
    counted = f"{type(value).__name__} of {len(value)}"
    if len(value) > _MOST_ITEMS:
        return counted
    if isinstance(value, dict):
        items = [part for pair in value.items() for part in pair]
    else:
        items = sorted(value, key=repr) if isinstance(value, (set, frozenset)) else [*value]
    inner = [mark_of(item) for item in items]
    return f"{counted} {_checksum(repr(inner).encode())}"
