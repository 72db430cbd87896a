"""What a batch counts: its samples, tokens and labels."""

from __future__ import annotations

import copy
from collections.abc import Mapping, MutableMapping
from typing import Any, NamedTuple

import numpy as np
import torch

from trainer_kit.utils.pytree import keys, tensors

IGNORED = -100
"""The label that counts for nothing (`ignore_index` of torch's cross_entropy)."""


class Counts(NamedTuple):
    """What a batch holds. Labels that lie on a device are counted there, as scalar tensors that nobody waits for.

    Attributes:
        samples: Samples of the dataset that the batch was made of.
        tokens: Tokens of `input_ids` that are no padding; 0 without them.
        labels: Labels that are not -100; samples where labels are missing or no whole numbers.
        shifted: The same without the first label of each row, for models that predict the next token.
    """

    samples: int
    tokens: int
    labels: Any
    shifted: Any

    def as_nothing(self) -> Counts:
        """Zeros of the same kind, for a batch that stands in: labels on a device stay counted there."""
        return Counts(0, 0, self.labels * 0, self.shifted * 0)


def count(batch: Any, samples: int) -> Counts:
    """Count what a batch holds, without touching the device.

    Args:
        batch: As the collator made it.
        samples: Samples that were collated. A batch's tensors do not tell: their first dimension may be nodes of
            graphs, objects in images, or channels.
    """
    labels = labels_of(batch)
    if labels is None or not is_whole(labels):
        plain = shifted = samples
    else:
        plain = _count_labels(labels)
        shifted = _count_labels(labels[..., 1:]) if labels.ndim > 1 else plain
    return Counts(samples, _count_tokens(batch), plain, shifted)


def rows_of(batch: Any) -> int | None:
    """The first dimension of a batch's first tensor that has one; None without such a tensor."""
    return next((tensor.shape[0] for tensor in tensors(batch) if tensor.ndim), None)


def samples_of(batch: Any) -> int:
    """The rows of a batch of which nothing else tells how many samples it was made of.

    Raises:
        ValueError: If it has none.
    """
    rows = rows_of(batch)
    if rows is None:
        raise ValueError(
            f"a batch is {shape_of(batch)}: its samples cannot be counted; data_collator must return tensors whose "
            "first dimension is the samples"
        )
    return rows


def labels_of(batch: Any) -> torch.Tensor | None:
    """The labels of a batch.

    They are the entry `labels` (or `label`) of a dict, the last element of a tuple or list, or the attribute `labels`,
    `label` or `y` of an object (torch_geometric's batches).
    """
    if isinstance(batch, (tuple, list)):
        labels = batch[-1] if len(batch) > 1 else None
    else:
        name = _label_name(batch)
        labels = None if name is None else _entry(batch, name)
    return labels if isinstance(labels, torch.Tensor) else None


def _label_name(batch: Any) -> str | None:
    """The name of the labels in a dict or an object; None where there are none."""
    names = ("labels", "label") if isinstance(batch, (Mapping, torch.Tensor)) else ("labels", "label", "y")
    return next((name for name in names if _entry(batch, name) is not None), None)


def _entry(batch: Any, name: str) -> Any:
    return batch.get(name, None) if isinstance(batch, Mapping) else getattr(batch, name, None)


def is_whole(labels: torch.Tensor) -> bool:
    """Whether labels are whole numbers, which are items where they are not -100."""
    return labels.dtype in (torch.int64, torch.int32, torch.int16, torch.int8) and labels.ndim > 0


def _count_labels(labels: torch.Tensor) -> Any:
    if labels.device.type == "cpu":
        return int(np.count_nonzero(labels.numpy() != IGNORED))
    return (labels != IGNORED).sum()


def _count_tokens(batch: Any) -> int:
    if not isinstance(batch, Mapping) or not isinstance(ids := batch.get("input_ids"), torch.Tensor):
        return 0
    mask = batch.get("attention_mask")
    if isinstance(mask, torch.Tensor) and mask.shape == ids.shape and mask.device.type == "cpu":
        return int(np.count_nonzero(mask.numpy()))
    return ids.numel()


def shape_of(batch: Any) -> str:
    """What a batch is, for a sentence."""
    holds = f" with the entries {', '.join(map(str, keys(batch)))}" if isinstance(batch, Mapping) else ""
    if isinstance(batch, (tuple, list)):
        holds = f" of {len(batch)}"
    return f"a {type(batch).__name__}{holds}"


def with_labels(batch: Any, labels: torch.Tensor) -> Any:
    """The batch, of its own kind, with other labels."""
    if hasattr(batch, "_fields"):
        return type(batch)(*batch[:-1], labels)
    if isinstance(batch, (tuple, list)):
        return type(batch)([*batch[:-1], labels])
    name = _label_name(batch)
    assert name is not None
    if isinstance(batch, Mapping):
        columns: Any = copy.copy(batch) if isinstance(batch, MutableMapping) else dict(batch)
        columns[name] = labels
        return columns
    changed = copy.copy(batch)
    setattr(changed, name, labels)
    return changed
