"""Notes of attributes' values, by which a later change shows, also of a part of a container or object."""

from __future__ import annotations

import types
from collections import deque
from itertools import islice
from typing import Any

import numpy as np
import torch
import xxhash
from torch import nn
from torch.utils.weak import WeakIdRef

from trainer_kit.utils.fingerprint import fingerprints
from trainer_kit.utils.generators import is_generator, is_global_generator, state_of_generator
from trainer_kit.utils.pytree import flatten_state
from trainer_kit.utils.vectors import as_vector

_DEEPEST = 3
"""Levels of containers and objects to look into."""
_ENDS = 32
"""Entries to look at from either end of a container."""
_MOST = 1_000
"""Largest number of entries to look at in all attributes."""
_LARGEST = 2**16
"""Largest array to read, in bytes."""
_READ = 2**18
"""Largest tensor of which all elements are read; of larger ones about so many."""
_CONTAINERS = (dict, list, tuple, deque)
_OPAQUE = (type, types.ModuleType, types.FunctionType, types.MethodType, nn.Module, torch.Tensor)


class AttributeNotes:
    """Notes of several values, with a bound on the work for all of them; a part that several hold counts once."""

    def __init__(self) -> None:
        self._left, self._seen = _MOST, set[int]()

    def note(self, value: Any, depth: int = _DEEPEST) -> Any:
        """Return the note of a value, without keeping it alive; None for one that shows no change.

        None and a tensor are different, so that a tensor that has replaced None has changed.

        Args:
            value: The value.
            depth: Levels to look into.
        """
        if value is None:
            return ("none",)
        if isinstance(value, torch.Tensor):
            return note_of_tensor(value)
        if type(value) in (int, float) or isinstance(value, np.generic):
            return repr(value)
        if isinstance(value, np.ndarray):
            return _note_of_array(value)
        if is_generator(value):
            return None if is_global_generator(value) else bits_of(state_of_generator(value))
        parts = _parts(value) if depth and self._left > 0 and id(value) not in self._seen else None
        if parts is None:
            return None
        self._seen.add(id(value))
        self._left -= len(parts)
        notes = [self.note(part, depth - 1) for part in parts]
        if isinstance(value, _CONTAINERS):
            return len(value), notes
        return notes if any(each is not None for each in notes) else None


def _parts(value: Any) -> list[Any] | None:
    """Return the parts of a container, the first and the last of many, or of an object; None for other values."""
    if isinstance(value, _CONTAINERS):
        entries = dict.values(value) if isinstance(value, dict) else value
        if len(value) <= 2 * _ENDS:
            return [*entries]
        return [*islice(entries, _ENDS), *islice(reversed(entries), _ENDS)]
    if isinstance(value, _OPAQUE) or not isinstance(own := getattr(value, "__dict__", None), dict):
        return None
    return [*islice(own.values(), 2 * _ENDS)]


def note_of_tensor(tensor: torch.Tensor) -> Any:
    """Return the note of a tensor; None for a parameter, which checkpoints hold, and where there are no versions."""
    if isinstance(tensor, nn.Parameter) or tensor.is_inference():
        return None
    return "tensor", WeakIdRef(tensor), tensor._version


def note_of_bits(tensor: torch.Tensor) -> Any:
    """Return what other bits of a tensor change; of a large one, those of evenly spaced elements, or its version."""
    flat = as_vector(tensor.detach())
    if len(flat) <= _READ:
        return tensor.shape, fingerprints([flat])
    step = len(flat) // _READ | 1  # odd, so that it meets all columns
    return tensor.shape, fingerprints([flat[::step]]), None if tensor.is_inference() else tensor._version


def bits_of(value: Any) -> Any:
    """Return what is equal for values with the same bits."""
    tree, found = flatten_state(value)
    return tree, [(*each.shape, str(each.dtype)) for each in found.values()], fingerprints([*found.values()])


def _note_of_array(array: np.ndarray[Any, Any]) -> Any:
    if array.dtype.hasobject or array.nbytes > _LARGEST:
        return None
    return array.shape, xxhash.xxh3_64_intdigest(array.tobytes())
