"""From samples to a batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import default_collate

from trainer_kit.loss import IGNORED

Collator = Callable[[list[Any]], Any]


def default_collator(processing_class: Any = None, pad_to_multiple_of: int | None = None) -> Collator:
    """The collator where the user gives none: padding where there is a tokenizer, else stacking.

    Raises:
        ValueError: If `pad_to_multiple_of` is set without a tokenizer to pad with.
    """
    if hasattr(processing_class, "pad_token_id"):
        return PadCollator(processing_class, pad_to_multiple_of)
    if pad_to_multiple_of is not None:
        raise ValueError(
            f"pad_to_multiple_of={pad_to_multiple_of} needs a tokenizer to pad with; give processing_class=tokenizer"
        )
    return stack


def stack(samples: list[Any]) -> Any:
    """Stacks tensors, arrays and numbers of all samples, inside dicts and tuples too; lists of numbers are rows.

    Raises:
        ValueError: If the samples' sizes or keys differ.
    """
    first = samples[0]
    try:
        if type(first) is dict and all(type(value) is torch.Tensor for value in first.values()):
            return {key: torch.stack([sample[key] for sample in samples]) for key in first}
        return default_collate([_rows_to_tensors(sample) for sample in samples])
    except (RuntimeError, KeyError, TypeError) as error:
        raise ValueError(
            f"samples cannot be stacked into a batch: {error}; samples of different lengths need "
            "processing_class=tokenizer (which pads) or a data_collator"
        ) from error


def _rows_to_tensors(sample: Any) -> Any:
    if isinstance(sample, dict):
        if any(type(value) is list for value in sample.values()):
            return {key: _row(value) if type(value) is list else value for key, value in sample.items()}
        return sample
    return sample


def _row(value: list[Any]) -> Any:
    """A list of numbers (nested evenly) as a tensor; anything else as it is."""
    try:
        return torch.as_tensor(value)
    except (TypeError, ValueError):
        return value


class PadCollator:
    """Pads each batch to its longest sample.

    `input_ids` are filled with the tokenizer's padding token, `attention_mask` with 0, `token_type_ids` with the
    tokenizer's padding type, `labels` with -100 and every other column with 0. A missing `attention_mask` is made.
    `label` is renamed `labels`, the name that transformers' models take.

    Args:
        tokenizer: Anything with `pad_token_id` (and `padding_side`, `pad_token_type_id`).
        pad_to_multiple_of: Rounds the padded length up.

    Raises:
        ValueError: If the tokenizer has no padding token.
    """

    def __init__(self, tokenizer: Any, pad_to_multiple_of: int | None = None) -> None:
        if tokenizer.pad_token_id is None:
            raise ValueError(
                f"the tokenizer {type(tokenizer).__name__} has no padding token; set one, "
                "for example tokenizer.pad_token = tokenizer.eos_token"
            )
        self.fill = {
            "input_ids": tokenizer.pad_token_id,
            "token_type_ids": getattr(tokenizer, "pad_token_type_id", 0),
            "labels": IGNORED,
        }
        self.left = getattr(tokenizer, "padding_side", "right") == "left"
        self.multiple = pad_to_multiple_of or 1

    def __call__(self, samples: list[Any]) -> dict[str, Any]:
        """Pads and stacks `samples`, a list of dicts.

        Raises:
            TypeError: If a sample is no dict.
            ValueError: If the samples' keys or sizes beyond the first dimension differ.
        """
        for sample in samples:
            if not isinstance(sample, Mapping):
                raise TypeError(
                    f"a sample is a {type(sample).__name__}; with a tokenizer samples must be dicts such as "
                    "{'input_ids': …, 'labels': …}, or give a data_collator"
                )
        names = list(samples[0])
        if any(set(sample) != set(names) for sample in samples):
            raise ValueError(f"the samples of a batch have different columns: {[list(sample) for sample in samples]}")
        columns = {name: [sample[name] for sample in samples] for name in names}
        if "label" in columns and "labels" not in columns:
            columns["labels"] = columns.pop("label")
        if "input_ids" in columns and "attention_mask" not in columns:
            columns["attention_mask"] = [np.ones(len(ids), dtype=np.int64) for ids in columns["input_ids"]]
        return {name: self._column(name, values) for name, values in columns.items()}

    def _column(self, name: str, values: list[Any]) -> Any:
        if not isinstance(values[0], (Sequence, np.ndarray, torch.Tensor)) or isinstance(values[0], str):
            return default_collate(values)
        rows = [value if isinstance(value, torch.Tensor) else torch.as_tensor(value) for value in values]
        if rows[0].ndim == 0:
            return torch.stack(rows)
        longest = max(len(row) for row in rows)
        length = -(-longest // self.multiple) * self.multiple if rows[0].ndim == 1 else longest
        padded = rows[0].new_full((len(rows), length, *rows[0].shape[1:]), self.fill.get(name, 0))
        for place, row in zip(padded, rows, strict=True):
            (place[length - len(row) :] if self.left else place[: len(row)]).copy_(row)
        return padded
