"""Digests of samples, to check whether a stream yields the same samples again."""

from __future__ import annotations

import marshal
from collections.abc import Iterator, Mapping
from types import BuiltinFunctionType, FunctionType
from typing import Any

import numpy as np
import torch
from xxhash import xxh3_64

from trainer_kit.utils.vectors import as_bytes

_MARSHAL = 2
"""The version whose bytes depend on values only, not on the identity of strings."""

_SCALARS = frozenset((int, float, complex, str, bytes, bool, type(None)))


def digest(samples: list[Any]) -> bytes | None:
    """Return a digest of samples; equal samples have the same. None if one of them cannot be compared.

    Args:
        samples: Samples of any type. Tensors on a device cannot be compared, since the host would wait for them, nor
            can objects that cannot be pickled.
    """
    found = xxh3_64()
    try:
        for sample in samples:
            _feed(found, sample)
    except Exception:  # a user's object may raise anything, and one that contains itself never ends
        return None
    return found.digest()


def _feed(found: xxh3_64, value: Any) -> None:
    if isinstance(value, torch.Tensor):
        found.update(f"{value.dtype}{list(value.shape)}".encode())
        found.update(_bytes_of(value))
    elif _is_plain(value):
        found.update(marshal.dumps(value, _MARSHAL))
    elif isinstance(value, Mapping):
        for key, item in value.items():
            found.update(repr(key).encode())
            _feed(found, item)
    elif isinstance(value, (list, tuple)):
        found.update(repr(len(value)).encode())
        for item in value:
            _feed(found, item)
    elif isinstance(value, (set, frozenset)):  # in an order that depends on the process
        _feed(found, sorted(map(_digest_of, value)))
    elif isinstance(value, np.ndarray):
        # An array of objects holds their addresses.
        _feed(found, value.tolist() if value.dtype.hasobject else np.ascontiguousarray(value))
    else:
        _feed(found, _content_of(value))


def _content_of(value: Any) -> Any:
    """Return what an object consists of. The bytes of its pickle depend on the identity of equal parts."""
    if hasattr(value, "to_dict"):  # torch_geometric's graphs
        return value.to_dict()
    if isinstance(value, (type, FunctionType, BuiltinFunctionType)):
        name = f"{value.__module__}.{value.__qualname__}"
        if "<" in name:
            raise TypeError(f"{name} is local, and may differ from another of this name")
        return name
    parts = value.__reduce_ex__(2)
    return parts if isinstance(parts, str) else [[*each] if isinstance(each, Iterator) else each for each in parts]


def _is_plain(value: Any) -> bool:
    """Return whether `marshal` writes the same bytes for equal values."""
    kind = type(value)
    if kind in (list, tuple):
        return _SCALARS.issuperset(map(type, value)) or all(map(_is_plain, value))
    if kind is dict:
        return all(map(_is_plain, value)) and all(map(_is_plain, value.values()))
    if kind is np.ndarray:
        return not value.dtype.hasobject and value.flags.c_contiguous
    return kind in _SCALARS or (isinstance(value, np.generic) and not value.dtype.hasobject)


def _digest_of(value: Any) -> bytes:
    found = xxh3_64()
    _feed(found, value)
    return found.digest()


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    if tensor.device.type != "cpu":
        raise TypeError(f"a tensor lies on {tensor.device}")
    try:
        return np.ascontiguousarray(tensor.detach().numpy()).data
    except TypeError:  # a dtype that numpy lacks
        return as_bytes(tensor).numpy().data


def has_shuffle_buffer(dataset: Any) -> bool:
    """Return whether a stream of `datasets` shuffles in a buffer, whose samples its state does not hold.

    `IterableDataset.state_dict` documents this. The buffer may belong to one of several interleaved streams, so that
    comparing the next samples does not reveal it.
    """
    waiting = [getattr(dataset, "_ex_iterable", None)]
    while waiting:
        each = waiting.pop()
        if type(each).__name__ == "BufferShuffledExamplesIterable":
            return True
        if each is not None:
            waiting += [getattr(each, "ex_iterable", None), *getattr(each, "ex_iterables", ())]
    return False
