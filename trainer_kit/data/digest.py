"""Digests of samples, to check whether a stream yields the same samples again."""

from __future__ import annotations

import marshal
import pickle
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from xxhash import xxh3_64

_PICKLE = 4
_MARSHAL = 2
"""The version whose bytes depend on values only, not on the identity of strings."""


def digest(samples: list[Any]) -> bytes | None:
    """Return a digest of samples; None if one of them cannot be compared.

    Args:
        samples: Samples of any type. Tensors on a device cannot be compared, since the host would wait for them.
    """
    found = xxh3_64()
    try:
        for sample in samples:
            _feed(found, sample)
    except Exception:  # pickling a user's object may raise anything
        return None
    return found.digest()


def _feed(found: xxh3_64, value: Any) -> None:
    if isinstance(value, torch.Tensor):
        found.update(f"{value.dtype}{list(value.shape)}".encode())
        found.update(_bytes_of(value))
        return
    try:
        found.update(marshal.dumps(value, _MARSHAL))  # numbers, texts, arrays, and containers of them
        return
    except ValueError:
        pass
    if isinstance(value, Mapping):
        for key, item in value.items():
            found.update(repr(key).encode())
            _feed(found, item)
    elif isinstance(value, (list, tuple)):
        found.update(repr(len(value)).encode())
        for item in value:
            _feed(found, item)
    elif hasattr(value, "to_dict"):  # torch_geometric's graphs
        _feed(found, value.to_dict())
    else:
        found.update(pickle.dumps(value, _PICKLE))


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    if tensor.device.type != "cpu":
        raise TypeError(f"a tensor lies on {tensor.device}")
    try:
        return np.ascontiguousarray(tensor.detach().numpy()).data
    except TypeError:  # a dtype that numpy lacks
        return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data


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
