"""Concatenation of batches, for a process whose devices compute one batch together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from trainer_kit.loss.batch import rows_of
from trainer_kit.utils.pytree import keys, tensors


def row_count(batch: Any) -> int:
    """Return the size of a batch's first dimension; 1 if it holds no tensor with dimensions."""
    rows = rows_of(batch)
    return 1 if rows is None else rows


def joined(batches: Sequence[Any]) -> Any:
    """Concatenate batches of the same structure.

    Tensors are concatenated along the first dimension, and lists without tensors one after another. Other values stay
    as they are if all batches have the same one; otherwise they become a list.

    Args:
        batches: Batches of the same structure, at least one.

    Returns:
        One batch of that structure.

    Raises:
        ValueError: If tensors differ in more than their first dimension.
    """
    first = batches[0]
    if len(batches) == 1:
        return first
    if isinstance(first, torch.Tensor):
        return _joined_tensors(batches)
    if isinstance(first, Mapping):
        mapped = {key: joined([batch[key] for batch in batches]) for key in keys(first)}
        return mapped if type(first) is dict else type(first)(mapped)  # type: ignore[call-arg]
    if isinstance(first, (list, tuple)) and next(tensors(first), None) is None:
        return type(first)(each for batch in batches for each in batch)
    if isinstance(first, (list, tuple)):
        columns = [joined(column) for column in zip(*batches, strict=True)]
        return type(first)(*columns) if hasattr(first, "_fields") else type(first)(columns)
    return first if all(batch == first for batch in batches) else list(batches)


def _joined_tensors(batches: Sequence[torch.Tensor]) -> torch.Tensor:
    if batches[0].ndim == 0:
        return torch.stack([*batches])
    shapes = sorted({tuple(batch.shape[1:]) for batch in batches})
    if len(shapes) > 1:
        raise ValueError(
            f"the batches of {len(batches)} devices are one batch, but their samples have the shapes {shapes[0]} and "
            f"{shapes[1]}; give all samples of the dataset one length"
        )
    return torch.cat([*batches])
