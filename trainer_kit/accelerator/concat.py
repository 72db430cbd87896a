"""Concatenation of batches, for a process whose devices compute one batch together, and their even distribution."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

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


def spread(batches: Sequence[tuple[int, Any]], shares: int, repeats: Sequence[tuple[int, Any]]) -> Spread | None:
    """Distribute the samples of batches evenly, so that the mean over shares is the mean over samples.

    Args:
        batches: Batches of the same structure, each with its number of samples.
        shares: Number of shares.
        repeats: Batches whose first samples fill the shares up to the same size.

    Returns:
        The shares, in the order of the samples; None if the batches cannot be cut into samples, or their samples have
        different shapes.
    """
    whole = [*batches, *repeats]
    forms = {tuple(tuple(tensor.shape[1:]) for tensor in tensors(batch)) for _, batch in whole}
    has_rows = all(rows > 0 and _has_rows(batch, rows) for rows, batch in whole)
    if not has_rows or len(forms) > 1 or () in forms:
        return None
    real = sum(rows for rows, _ in batches)
    size = -(-real // shares)
    rounds = -(-(size * shares - real) // sum(rows for rows, _ in repeats))
    samples = joined([batch for _, batch in [*batches, *(each for _ in range(rounds) for each in repeats)]])
    return Spread(samples, size, real)


class Spread(NamedTuple):
    """Samples of several batches, in shares of the same size.

    Attributes:
        samples: One batch with all of them, and repeats.
        size: Number of samples in a share.
        real: Number of samples that are not repeats.
    """

    samples: Any
    size: int
    real: int

    def share(self, first: int, count: int) -> tuple[int, int, Any]:
        """Return the number of samples, how many of them are not repeats, and the batch of `count` shares."""
        start, rows = first * self.size, count * self.size
        return rows, min(max(self.real - start, 0), rows), _rows(self.samples, slice(start, start + rows))


def _has_rows(batch: Any, rows: int) -> bool:
    """Return whether each part of a batch has an entry for each of its samples, or is the same for all of them."""
    if isinstance(batch, torch.Tensor):
        return batch.ndim > 0 and batch.shape[0] == rows
    if isinstance(batch, Mapping):
        return all(_has_rows(batch[key], rows) for key in keys(batch))
    if isinstance(batch, (list, tuple)):
        if next(tensors(batch), None) is None:
            return len(batch) == rows
        return all(_has_rows(each, rows) for each in batch)
    return batch is None or isinstance(batch, (str, bool, int, float))


def _rows(batch: Any, part: slice) -> Any:
    if isinstance(batch, torch.Tensor):
        return batch[part]
    if isinstance(batch, Mapping):
        mapped = {key: _rows(batch[key], part) for key in keys(batch)}
        return mapped if type(batch) is dict else type(batch)(mapped)  # type: ignore[call-arg]
    if isinstance(batch, (list, tuple)) and next(tensors(batch), None) is None:
        return type(batch)(batch[part])
    if isinstance(batch, (list, tuple)):
        columns = [_rows(each, part) for each in batch]
        return type(batch)(*columns) if hasattr(batch, "_fields") else type(batch)(columns)
    return batch


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
