"""The counts of a batch: its samples, tokens and labels."""

from __future__ import annotations

import copy
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn.utils.rnn import PackedSequence

from trainer_kit.utils.pytree import keys, tensors

IGNORED = -100
"""The label that losses ignore (`ignore_index` of torch's cross_entropy)."""


_POSITIONS = ("start_positions", "end_positions")
"""Labels of models that answer questions with a part of the text."""


_FEW = 64
"""Labels up to this number are counted faster by Python than by numpy."""


class Counts(NamedTuple):
    """The counts of a batch. Labels on a device are counted there, as scalar tensors, without waiting for the device.

    Attributes:
        samples: Dataset samples in the batch.
        tokens: Tokens of `input_ids` without padding; 0 if there are no `input_ids`.
        labels: Labels that are not -100; samples if labels are missing or not integers.
        shifted: `labels` without the first label of each row, for models that predict the next token.
    """

    samples: int
    tokens: int
    labels: Any
    shifted: Any

    def as_nothing(self) -> Counts:
        """Return zero counts of the same types, for a dummy batch; counts on a device stay there."""
        return Counts(0, 0, self.labels * 0, self.shifted * 0)


def count(batch: Any, samples: int) -> Counts:
    """Count the samples, tokens and labels of a batch, without waiting for the device.

    Args:
        batch: A batch from the collator.
        samples: Number of collated samples. The first dimension of the batch's tensors may be another number: nodes
            of graphs, objects in images, or channels.

    Returns:
        The counts of the batch.
    """
    labels = labels_of(batch)
    if labels is not None and hasattr(batch, "input_id") and hasattr(batch, "batch_size"):
        labels = labels[: batch.batch_size]  # torch_geometric's sampled neighbors follow the nodes that are trained on
    if labels is None or not is_whole(labels):
        plain = shifted = samples
    else:
        plain = _count_labels(labels)
        shifted = _count_labels(labels[..., 1:]) if labels.ndim > 1 else plain
    return Counts(samples, _count_tokens(batch), plain, shifted)


def rows_of(batch: Any) -> int | None:
    """Return the first dimension of the batch's first tensor with a dimension; None without such a tensor."""
    return next((tensor.shape[0] for tensor in tensors(batch) if tensor.ndim), None)


def samples_of(batch: Any) -> int:
    """Return the rows of a batch whose number of samples is not known otherwise.

    Raises:
        ValueError: If no tensor of the batch has a dimension.
    """
    rows = rows_of(batch)
    if rows is None:
        raise ValueError(
            f"a batch is {shape_of(batch)}: its samples cannot be counted; data_collator must return tensors whose "
            "first dimension is the samples"
        )
    return rows


def has_columns(batch: Any) -> bool:
    """Return whether a batch is a tuple or list of columns; a `PackedSequence`, which is a tuple, is one value."""
    return isinstance(batch, (tuple, list)) and not isinstance(batch, PackedSequence)


def labels_of(batch: Any) -> torch.Tensor | None:
    """Return the labels of a batch; None if it has none.

    Labels are the entry `labels` (or `label`) of a dict, the last element of a tuple or list, of a named one the field
    `labels`, `label`, `targets`, `target` or `y`, or the attribute `labels`, `label` or `y` of an object
    (torch_geometric's batches).
    """
    if type(batch) is dict and "labels" in batch and batch["labels"] is not None:
        labels = batch["labels"]
    elif isinstance(batch, (tuple, list)):
        labels = batch[_label_place(batch)] if has_columns(batch) and len(batch) > 1 else None
    else:
        name = _label_name(batch)
        labels = None if name is None else _entry(batch, name)
    return labels if isinstance(labels, torch.Tensor) else None


def targets_of(batch: Any, names: Sequence[str] | None, label_columns: Sequence[str] = ()) -> Any:
    """Return the labels that metrics get: a tensor, a list, a tuple of several columns, or None without labels.

    Args:
        batch: The batch.
        names: The columns; None: the labels of the batch, else `start_positions` and `end_positions`, else the
            `label_columns` that it has.
        label_columns: Columns of a dict that are labels by their names, see `label_columns_of`.

    Raises:
        ValueError: If the batch has some of the columns in `names` only.
    """
    if names is None:
        return _default_targets(batch, label_columns)
    columns = tuple(_entry(batch, name) for name in names)
    missing = [name for name, column in zip(names, columns, strict=True) if column is None]
    if len(missing) == len(names):
        return None
    if missing:
        raise missing_label(missing[0], batch)
    return _one_or_all(columns)


def _default_targets(batch: Any, label_columns: Sequence[str]) -> Any:
    labels = labels_of(batch)
    if labels is None:
        labels = _nested_labels(batch)
    if labels is not None or not isinstance(batch, Mapping):
        return labels
    positions = _columns_in(batch, _POSITIONS)
    return _one_or_all(positions if len(positions) == len(_POSITIONS) else _columns_in(batch, label_columns))


def _nested_labels(batch: Any) -> Any:
    """Return labels that are no tensor, such as the targets of detection models or of several tasks; None without."""
    if isinstance(batch, (tuple, list)):
        labels = batch[_label_place(batch)] if has_columns(batch) and len(batch) > 1 else ()
        is_mappings = isinstance(labels, (tuple, list)) and all(isinstance(each, Mapping) for each in labels)
        is_nested = is_mappings or any(True for _ in tensors(labels))
    else:
        name = _label_name(batch)
        labels = () if name is None else _entry(batch, name)
        is_listed = isinstance(labels, (tuple, list)) and not any(isinstance(each, str) for each in labels)
        is_nested = is_listed or isinstance(labels, Mapping)
    return labels if is_nested and len(labels) else None


def _columns_in(batch: Mapping[Any, Any], names: Sequence[str]) -> tuple[Any, ...]:
    columns = (_entry(batch, name) for name in names)
    return tuple(column for column in columns if column is not None)


def _one_or_all(columns: tuple[Any, ...]) -> Any:
    return columns if len(columns) > 1 else next(iter(columns), None)


def missing_label(name: str, batch: Any) -> ValueError:
    """Return the error for a column of `label_names` that a batch lacks."""
    return ValueError(f"label_names has {name!r}, but a batch is {shape_of(batch)}; name columns that it has")


def _label_name(batch: Any) -> str | None:
    """Return the name of the labels in a dict or an object; None without labels."""
    names = ("labels", "label") if isinstance(batch, (Mapping, torch.Tensor)) else ("labels", "label", "y")
    return next((name for name in names if _entry(batch, name) is not None), None)


def _label_place(batch: Sequence[Any]) -> int:
    """Return the place of the labels in a tuple or list."""
    fields = getattr(batch, "_fields", ())
    names = ("labels", "label", "targets", "target", "y")
    return next((fields.index(name) for name in names if name in fields), -1)


def _entry(batch: Any, name: str) -> Any:
    return batch.get(name, None) if isinstance(batch, Mapping) else getattr(batch, name, None)


def is_whole(labels: torch.Tensor) -> bool:
    """Return whether labels are integers; those that are not -100 count as items."""
    return labels.dtype in (torch.int64, torch.int32, torch.int16, torch.int8) and labels.ndim > 0


def _count_labels(labels: torch.Tensor) -> Any:
    if labels.device.type == "cpu":
        if (number := labels.numel()) <= _FEW:
            return number - labels.flatten().tolist().count(IGNORED)
        return int(np.count_nonzero(labels.numpy() != IGNORED))
    return (labels != IGNORED).sum()


def _count_tokens(batch: Any) -> int:
    if type(batch) is dict and "input_ids" not in batch:
        return 0
    if not isinstance(batch, Mapping) or not isinstance(ids := batch.get("input_ids"), torch.Tensor):
        return 0
    mask = batch.get("attention_mask")
    if isinstance(mask, torch.Tensor) and mask.shape == ids.shape and mask.device.type == "cpu":
        return int(np.count_nonzero(mask.numpy()))
    return ids.numel()


def shape_of(batch: Any) -> str:
    """Describe a batch for an error message."""
    holds = f" with the entries {', '.join(map(str, keys(batch)))}" if isinstance(batch, Mapping) else ""
    if isinstance(batch, (tuple, list)):
        holds = f" of {len(batch)}"
    return f"a {type(batch).__name__}{holds}"


def with_labels(batch: Any, labels: torch.Tensor) -> Any:
    """Return a batch of the same type with other labels."""
    if isinstance(batch, (tuple, list)):
        values = [*batch]
        values[_label_place(batch)] = labels
        return type(batch)(*values) if hasattr(batch, "_fields") else type(batch)(values)
    name = _label_name(batch)
    assert name is not None
    if isinstance(batch, Mapping):
        columns: Any = copy.copy(batch) if isinstance(batch, MutableMapping) else dict(batch)
        columns[name] = labels
        return columns
    changed = copy.copy(batch)
    setattr(changed, name, labels)
    return changed


def samples_in(batch: Any) -> int:
    """Return the samples of a batch that comes as it is.

    They are the graphs of torch_geometric's batches, the nodes for which its loaders sampled neighbors, the batch size
    of a TensorDict, the sequences of a `PackedSequence`, the length of the labels, of the lists in a tuple (detection),
    of the first tensor, or of an object with columns of its length (speechbrain's PaddedBatch, recbole's Interaction).

    Raises:
        ValueError: If nothing shows the number of samples.
    """
    if isinstance(batch, PackedSequence):
        return int(batch.batch_sizes[0])
    for name in ("num_graphs", "batch_size"):
        number = None if isinstance(batch, (dict, list, tuple)) else getattr(batch, name, None)
        if isinstance(number, torch.Size):
            number = number[0] if number else None
        if isinstance(number, int):
            return number
    labels = labels_of(batch)
    if labels is not None and labels.ndim:
        return len(labels)
    if isinstance(batch, (list, tuple)) and batch and isinstance(batch[0], (list, tuple)):
        return len(batch[0])
    rows = rows_of(batch)
    if rows is None:
        rows = _own_length(batch)
    if rows is None:
        convert = ", so convert numpy arrays by torch.as_tensor" if _has_arrays(batch) else ""
        raise ValueError(
            f"a batch is {shape_of(batch)}: its samples cannot be counted; in place of a DataLoader give "
            "train_dataset=loader.dataset, data_collator=loader.collate_fn, while ReadyBatches must give tensors whose "
            f"first dimension is the samples{convert}"
        )
    return rows


def _own_length(batch: Any) -> int | None:
    """Return the length of an object if all its public attributes that have rows have as many; None otherwise.

    A length alone may be the number of columns.
    """
    if isinstance(batch, (Mapping, Sequence, np.ndarray, torch.Tensor)) or not hasattr(batch, "__len__"):
        return None
    columns = [value for name, value in getattr(batch, "__dict__", {}).items() if not name.startswith("_")]
    lengths = {rows for column in columns for rows in _lengths(column)}
    return len(batch) if lengths == {len(batch)} else None


def _lengths(column: Any) -> list[int]:
    """Return the rows of a column; those of each field of a named tuple (padded values with their lengths) or dict."""
    if hasattr(column, "_fields"):
        return [rows for field in column for rows in _lengths(field)]
    if isinstance(column, dict):  # lists there may be anything
        return [rows for each in column.values() if not isinstance(each, (list, tuple)) for rows in _lengths(each)]
    if isinstance(column, (torch.Tensor, np.ndarray)):
        return [*column.shape[:1]]
    return [len(column)] if isinstance(column, (list, tuple)) else []


def _has_arrays(tree: Any) -> bool:
    values = tree.values() if isinstance(tree, Mapping) else tree if isinstance(tree, (list, tuple)) else ()
    return isinstance(tree, np.ndarray) or any(map(_has_arrays, values))


def split(batch: Any, cuts: Sequence[tuple[int, int]]) -> list[Any]:
    """Split a batch that comes as it is by its first dimension.

    Args:
        batch: The batch.
        cuts: (start, stop) of each part, in samples; together they are the whole batch.

    Raises:
        ValueError: If a part of the batch does not have its samples in the first dimension.
    """
    if len(cuts) == 1:
        return [batch]
    if isinstance(batch, (list, tuple)):  # columns
        columns = [[_rows(column, cut, cuts[-1][1]) for column in batch] for cut in cuts]
        return [type(batch)(*each) if hasattr(batch, "_fields") else type(batch)(each) for each in columns]
    return [_rows(batch, cut, cuts[-1][1]) for cut in cuts]


def _rows(value: Any, cut: tuple[int, int], samples: int) -> Any:
    if isinstance(value, dict):
        return {key: _rows(each, cut, samples) for key, each in value.items()}
    if value is None or isinstance(value, (str, int, float)) or getattr(value, "ndim", None) == 0:
        return value
    is_sliced = isinstance(value, (torch.Tensor, np.ndarray, list, tuple, MutableMapping))
    if is_sliced and len(value) == samples:
        return value[slice(*cut)]
    raise ValueError(
        f"auto_find_batch_size=True has to split a ready batch of {samples} samples, but it holds {shape_of(value)} "
        "that does not have them in its first dimension; set it to False and make the loader's batches smaller"
    )
