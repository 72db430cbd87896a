"""Collation of several small batches by one call, which takes less time than one call for each."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from torch.utils.data import default_collate

from trainer_kit.data.collate import Collator, is_torchs_collation, stack, stack_with_labels
from trainer_kit.data.columns import ColumnFilter
from trainer_kit.utils.pytree import tensors

_MOST_BYTES = 2**16
_MOST_SAMPLES = 512
_LEAST = 4
"""Fewer batches at once take longer than one by one: the samples of all are in memory."""
_NUMBERS = (int, float, bool)
_ARRAYS = (torch.Tensor, np.ndarray)

_dtype_of = attrgetter("dtype")


def batches_at_once(collate: Collator, batch: Any, samples: int) -> int:
    """Return how many batches like this one to collate at once, by the size of its samples.

    Batches of one sample are collated one by one, since a dataset may return the same memory for each sample.

    Args:
        collate: The collator.
        batch: A batch that it has made.
        samples: Number of its samples.
    """
    if isinstance(collate, ColumnFilter):
        collate = collate.collate
    stacks_rows = collate in (stack, stack_with_labels) or (collate is default_collate and is_torchs_collation())
    values = [*tensors(batch)]
    if not stacks_rows or samples == 1 or not all(map(_is_plain, values)):
        return 1
    size = max(1, sum(each.nbytes for each in values))
    number = min(_MOST_BYTES // size, _MOST_SAMPLES // samples)
    return number if number >= _LEAST else 1


def collate_together(collate: Collator, parts: Sequence[list[Any]]) -> list[Any]:
    """Return the batches that a collator makes of the samples of each.

    Args:
        collate: A collator that stacks.
        parts: The samples of each batch.
    """
    samples = [*chain.from_iterable(parts)]
    if _are_alike(samples):
        try:
            cut = _cut(collate(samples), [*map(len, parts)])
        except (RuntimeError, TypeError, ValueError):  # those of each batch alone may still fit together
            cut = None
        if cut is not None:
            return cut
    return [*map(collate, parts)]


def _are_alike(samples: list[Any]) -> bool:
    """Return whether all samples are flat and of the same types, so that those of one do not change others."""
    first = samples[0]
    kind = type(first)
    if {*map(type, samples)} != {kind} or kind not in (dict, tuple):
        return False
    if {*map(len, samples)} != {len(first)}:
        return False
    columns: Any = zip(*samples, strict=True) if kind is tuple else ([each[key] for each in samples] for key in first)
    try:
        return all(map(_is_alike, columns))
    except KeyError:  # as many columns, but others
        return False


def _is_alike(column: Sequence[Any]) -> bool:
    (kind, *others) = {*map(type, column)}
    if kind is torch.Tensor and not _is_plain(column[0]):
        return False
    return not others and (kind in _NUMBERS or (kind in _ARRAYS and len({*map(_dtype_of, column)}) == 1))


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not (tensor.is_nested or tensor.is_quantized)


def _cut(batch: Any, sizes: Sequence[int]) -> list[Any] | None:
    """Cut a batch into batches with memory of their own; None if it is none of stacked tensors alone."""
    kind = type(batch)
    values = [*batch.values()] if kind is dict else batch
    if kind not in (dict, tuple, list) or {*map(type, values)} != {torch.Tensor}:
        return None
    if {*map(len, values)} != {sum(sizes)}:
        return None
    parts = zip(*([part.clone() for part in value.split(sizes)] for value in values), strict=True)
    return [dict(zip(batch, part, strict=True)) for part in parts] if kind is dict else [kind(part) for part in parts]
