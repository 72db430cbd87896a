"""Collators, which make a batch from a list of samples."""

from __future__ import annotations

import contextlib
import sys
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import reduce
from typing import Any

import numpy as np
import torch
from torch.utils.data import default_collate
from torch.utils.data._utils.collate import default_collate_fn_map

from trainer_kit.loss.batch import IGNORED
from trainer_kit.strategies.batch_shapes import power_of_two
from trainer_kit.utils.user_warnings import warn

Collator = Callable[[list[Any]], Any]


OTHER_LABELS = ("label", "label_ids")
"""Columns that become `labels` for a model whose `forward` has that name."""

_TORCHS = dict(default_collate_fn_map)
"""What torch's `default_collate` does with values, by type."""

_UNLIMITED = 1_000_000
"""A tokenizer's `model_max_length` of at least this means that it has no limit."""


def default_collator(
    processing_class: Any = None,
    pad_to_multiple_of: int | None = None,
    makes_mask: bool = True,
    pad_to_lengths: list[int] | None = None,
    static_shapes: bool = False,
) -> Collator:
    """Return the default collator: it pads if there is a tokenizer or a feature extractor of audio, else it stacks.

    Args:
        processing_class: A tokenizer to pad with, a `SequenceFeatureExtractor` of transformers, for which its own
            `DataCollatorWithPadding` is returned, or anything else; None: none.
        pad_to_multiple_of: See `PadCollator`.
        makes_mask: See `PadCollator`.
        pad_to_lengths: See `PadCollator`.
        static_shapes: See `PadCollator`.

    Raises:
        ValueError: If `pad_to_multiple_of` or `pad_to_lengths` is set without a tokenizer to pad with; a feature
            extractor takes the first.
    """
    if hasattr(processing_class, "pad_token_id"):
        return PadCollator(processing_class, pad_to_multiple_of, makes_mask, pad_to_lengths, static_shapes)
    if pad_to_lengths is None and _is_feature_extractor(processing_class):
        collate: Collator = sys.modules["transformers"].DataCollatorWithPadding(
            processing_class, pad_to_multiple_of=pad_to_multiple_of
        )
        return collate
    for name, value in (("pad_to_multiple_of", pad_to_multiple_of), ("pad_to_lengths", pad_to_lengths)):
        if value is not None:
            raise ValueError(f"{name}={value} needs a tokenizer to pad with; give processing_class=tokenizer")
    return stack


def _is_feature_extractor(processing_class: Any) -> bool:
    """Return whether it is transformers' feature extractor of sequences, such as audio, which pads them."""
    module = sys.modules.get("transformers.feature_extraction_sequence_utils")  # imported already if it is one
    return module is not None and isinstance(processing_class, module.SequenceFeatureExtractor)


def stack(samples: list[Any]) -> Any:
    """Stack the tensors, arrays and numbers of all samples, also inside dicts and tuples.

    A list of numbers becomes a row. Python floats get torch's default dtype, which model weights have too.

    Raises:
        ValueError: If the samples' sizes or keys differ; the message names the column.
    """
    batch = _stack_tensors(samples) if type(samples[0]) is dict else None
    return _stack(samples) if batch is None else batch


def default_collate_in_process(samples: list[Any]) -> Any:
    """Collate as torch's `default_collate` does, in half of the time for tensors, without memory to share."""
    batch = _stack_tensors(samples) if is_torchs_collation() else None
    return default_collate(samples) if batch is None else batch


def is_torchs_collation() -> bool:
    """Return whether `default_collate` does what torch's does; users may replace functions of it, and add some."""
    return default_collate_fn_map == _TORCHS


def _stack_tensors(samples: list[Any]) -> dict[Any, torch.Tensor] | list[torch.Tensor] | None:
    """Stack samples that are dicts or tuples of nothing but tensors, quickly.

    Returns:
        A dict, or a list for tuples; None for other samples and for different ones, which the general way names.
    """
    first = samples[0]
    kind = type(first)
    values: Any = first.values() if kind is dict else first if kind is tuple else ()
    if {*map(type, values)} != {torch.Tensor} or {value.layout for value in values} != {torch.strided}:
        return None
    try:
        if sum(map(len, samples)) != len(first) * len(samples):  # some have more columns, or fewer
            return None
        if kind is tuple:
            return [torch.stack(column) for column in zip(*samples, strict=True)]
        return {key: torch.stack([sample[key] for sample in samples]) for key in first}
    except (KeyError, RuntimeError, TypeError, ValueError):
        return None


def warn_of_ready_batches(role: str, sample: Any, collate: Collator) -> None:
    """Warn if what a dataset gives as samples may be batches, which the default collator would stack again.

    A time series with a label for each of its moments has such shapes too, so that this cannot be an error.

    Args:
        role: Name of the argument that holds the dataset.
        sample: The dataset's first sample.
        collate: The run's collator; one of the user's own is not doubted.
    """
    size = _size_of_batch(sample)
    if size is not None and getattr(collate, "collate", collate) in (stack, stack_with_labels):
        warn(
            f"the tensors of {role}'s first sample all have the length {size}: if that is a batch already, give "
            f"ReadyBatches({role}), since samples are stacked into batches; if not, data_collator="
            "torch.utils.data.default_collate says so"
        )


def _size_of_batch(sample: Any) -> int | None:
    """Return the samples of what may be a batch; None if it is surely one sample, such as tokens or a picture."""
    columns = list(sample.values()) if isinstance(sample, Mapping) else sample
    if not isinstance(columns, (list, tuple)) or len(columns) < 2:
        return None
    if not all(isinstance(column, (torch.Tensor, np.ndarray)) and column.ndim for column in columns):
        return None
    sizes, dimensions = {len(column) for column in columns}, [column.ndim for column in columns]
    is_batch = len(sizes) == 1 and max(sizes) > 1 and max(dimensions) > 1 and min(dimensions) < 3
    return sizes.pop() if is_batch else None


def stack_with_labels(samples: list[Any]) -> Any:
    """Stack as `stack` does, and rename `label` or `label_ids` to `labels`, as transformers' default collator does."""
    batch = stack(samples)
    if isinstance(batch, dict):
        _rename_label(batch, OTHER_LABELS)
    return batch


def _rename_label(columns: dict[str, Any], names: Sequence[str]) -> None:
    """Rename the first of these columns to `labels`, unless there is one."""
    if "labels" in columns:
        return
    for name in names:
        if name in columns:
            columns["labels"] = columns.pop(name)
            return


def _check_columns(samples: list[Any]) -> None:
    first = samples[0]
    if any(not isinstance(sample, Mapping) or sample.keys() != first.keys() for sample in samples):
        shown = [list(each) if isinstance(each, Mapping) else type(each).__name__ for each in samples]
        raise ValueError(f"the samples of a batch have different columns: {shown}; give all of them the same")


def _stack(values: list[Any], column: Any = None) -> Any:
    first = values[0]
    if isinstance(first, Mapping):
        _check_columns(values)
        names = first.keys()  # a TensorDict cannot be iterated
        return {name: _stack([value[name] for value in values], name) for name in names}
    if isinstance(first, tuple) and all(isinstance(value, tuple) and len(value) == len(first) for value in values):
        parts = [_stack(list(part), column) for part in zip(*values, strict=True)]
        return type(first)(*parts) if hasattr(first, "_fields") else tuple(parts)
    try:
        return _stack_leaves(values)
    except (RuntimeError, TypeError, ValueError) as error:
        place = "" if column is None else f" (column {column!r})"
        if type(values[0]).__module__.startswith("torch_geometric."):
            raise ValueError(
                f"graphs cannot be stacked into a batch{place}; give data_collator=Batch.from_data_list of "
                "torch_geometric.data, or a DataLoader of torch_geometric.loader as the dataset"
            ) from error
        advice = "samples of different lengths need processing_class=tokenizer (which pads) or a data_collator"
        if "equal size" in str(error):
            advice += "; samples that are batches already need ReadyBatches(dataset)"
        if "batch must contain" in str(error):  # a type that torch does not collate, such as a row of pandas or polars
            advice = "convert it to one of these in the dataset, or give a data_collator"
        raise ValueError(f"samples cannot be stacked into a batch{place}: {error}; {advice}") from error


def _stack_leaves(values: list[Any]) -> Any:
    first = values[0]
    if isinstance(first, list):
        rows = [_row(value) for value in values]
        return torch.stack(rows) if isinstance(rows[0], torch.Tensor) else default_collate(values)
    if isinstance(first, torch.Tensor):
        return torch.stack(values)
    return torch.tensor(values) if isinstance(first, (int, float)) else default_collate(values)


def _row(value: list[Any]) -> Any:
    """Convert an evenly nested list of numbers to a tensor; return anything else unchanged."""
    try:
        return torch.as_tensor(value)
    except (TypeError, ValueError):
        return value


class PadCollator:
    """Pad each batch to its longest sample, or to one of a few lengths.

    `input_ids` are padded with the tokenizer's padding token, `attention_mask` with 0, `token_type_ids` with the
    tokenizer's padding type, `labels` with -100 and every other column with 0. `label` is renamed `labels`, the name
    that transformers' models take.

    Args:
        tokenizer: Any object with `pad_token_id` (optional: `padding_side`, `pad_token_type_id`, `model_max_length`).
        pad_to_multiple_of: Rounds the padded length up to a multiple of this; None: no rounding.
        makes_mask: Whether to add an `attention_mask` if samples have none; False for a model that takes none.
        pad_to_lengths: Pads to the smallest of these lengths that fits; None: to the longest sample.
        static_shapes: Whether, without both options above, to pad to the next power of two of at least 32, but not
            beyond the tokenizer's `model_max_length`.

    Raises:
        ValueError: If the tokenizer has no padding token, or both padding options are given.
    """

    def __init__(
        self,
        tokenizer: Any,
        pad_to_multiple_of: int | None = None,
        makes_mask: bool = True,
        pad_to_lengths: list[int] | None = None,
        static_shapes: bool = False,
    ) -> None:
        if tokenizer.pad_token_id is None:
            raise ValueError(
                f"the tokenizer {type(tokenizer).__name__} has no padding token; set one, "
                "for example tokenizer.pad_token = tokenizer.eos_token"
            )
        if pad_to_multiple_of is not None and pad_to_lengths is not None:
            raise ValueError(
                f"pad_to_multiple_of={pad_to_multiple_of} and pad_to_lengths={pad_to_lengths} contradict each other; "
                "set one of them"
            )
        self.fill = {
            "input_ids": tokenizer.pad_token_id,
            "token_type_ids": getattr(tokenizer, "pad_token_type_id", 0),
            "labels": IGNORED,
        }
        self.left = getattr(tokenizer, "padding_side", "right") == "left"
        self.multiple = pad_to_multiple_of or 1
        self.lengths = sorted(pad_to_lengths) if pad_to_lengths is not None else None
        self.to_powers = static_shapes and pad_to_multiple_of is None and pad_to_lengths is None
        self.limit = getattr(tokenizer, "model_max_length", None) or _UNLIMITED
        self.makes_mask = makes_mask

    def __call__(self, samples: list[Any]) -> dict[str, Any]:
        """Pad and stack `samples`, a list of dicts.

        Raises:
            TypeError: If a sample is not a dict.
            ValueError: If the samples' keys or sizes beyond the first dimension differ, or a sample is longer than
                the largest of `pad_to_lengths`.
        """
        for sample in samples:
            if not isinstance(sample, Mapping):
                raise TypeError(
                    f"a sample is a {type(sample).__name__}; with a tokenizer samples must be dicts such as "
                    "{'input_ids': …, 'labels': …}, or give a data_collator"
                )
        _check_columns(samples)
        columns = {name: [sample[name] for sample in samples] for name in samples[0]}
        _rename_label(columns, ("label",))
        if self.makes_mask and "input_ids" in columns and "attention_mask" not in columns:
            columns["attention_mask"] = [np.ones(len(ids), dtype=np.int64) for ids in columns["input_ids"]]
        tokens = [len(ids) for ids in columns.get("input_ids", [])]
        return {name: self._column(name, values, tokens) for name, values in columns.items()}

    def _column(self, name: str, values: list[Any], tokens: list[int]) -> Any:
        if not isinstance(values[0], (Sequence, np.ndarray, torch.Tensor)) or isinstance(values[0], str):
            return _stack(values, name)
        with _naming(name):
            rows = [torch.as_tensor(value) for value in values]
            if not rows[0].ndim:
                return torch.stack(rows)
            lengths = [len(row) for row in rows]
        length = max(lengths)
        # Leave equal lengths other than those of the tokens, such as the channels of an image.
        if len(set(lengths)) > 1 or lengths == tokens:
            length = self._length(name, length)
        with _naming(name):
            return self._padded(name, rows, length)

    def _padded(self, name: str, rows: list[torch.Tensor], length: int) -> torch.Tensor:
        dtypes = [row.dtype for row in rows if row.numel()] or [rows[0].dtype]  # an empty list has no dtype of its own
        shape = (len(rows), length, *rows[0].shape[1:])
        padded = torch.full(shape, self.fill.get(name, 0), dtype=reduce(torch.promote_types, dtypes))
        for place, row in zip(padded, rows, strict=True):
            (place[length - len(row) :] if self.left else place[: len(row)])[...] = row
        return padded

    def _length(self, name: str, longest: int) -> int:
        """Return the padded length of a column whose longest sample has this length."""
        if self.to_powers:
            power = power_of_two(longest)
            return min(power, self.limit) if longest <= self.limit < _UNLIMITED else power
        if self.lengths is None:
            return -(-longest // self.multiple) * self.multiple
        if longest > self.lengths[-1]:
            raise ValueError(
                f"a sample's column {name!r} has a length of {longest}, above the largest of "
                f"pad_to_lengths={self.lengths}; add a larger one, or truncate the samples"
            )
        return self.lengths[bisect_left(self.lengths, longest)]


@contextlib.contextmanager
def _naming(column: str) -> Iterator[None]:
    """Name the column in an error that padding raises."""
    try:
        yield
    except (RuntimeError, TypeError, ValueError) as error:
        raise ValueError(
            f"column {column!r} cannot be padded: {error}; rows must be numbers that differ in their first dimension "
            "only, else give a data_collator"
        ) from error
