"""What samples are, in a few bytes, to find out whether a stream gives the same ones again."""

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
"""The version whose bytes depend on values alone, not on which strings are one object."""


def digest(samples: list[Any]) -> bytes | None:
    """A digest of samples; None where one of them holds what cannot be compared.

    Args:
        samples: Of any kind. What lies on a device cannot be compared, since the host would wait for it.
    """
    found = xxh3_64()
    try:
        for sample in samples:
            _feed(found, sample)
    except Exception:  # an object of the user's own, whose pickling may raise anything
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
    """Whether a stream of `datasets` shuffles in a buffer, whose samples its state does not hold.

    `datasets` says so of `IterableDataset.state_dict`. The buffer may be of one of several interleaved streams, so that
    the next samples would not show it.
    """
    waiting = [getattr(dataset, "_ex_iterable", None)]
    while waiting:
        each = waiting.pop()
        if type(each).__name__ == "BufferShuffledExamplesIterable":
            return True
        if each is not None:
            waiting += [getattr(each, "ex_iterable", None), *getattr(each, "ex_iterables", ())]
    return False
