"""Batches that are collated by one call are those that are collated one by one, to the bit and the dtype."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate

from trainer_kit.data import collate
from trainer_kit.data.collate import stack, stack_with_labels
from trainer_kit.data.columns import ColumnFilter
from trainer_kit.data.joint_collation import batches_at_once, collate_together


class Pair(NamedTuple):
    x: torch.Tensor
    y: int


def row(number: int) -> torch.Tensor:
    return torch.arange(3, dtype=torch.float32) + number


ALIKE: dict[str, Callable[[int], Any]] = {
    "dicts of tensors": lambda n: {"x": row(n), "label": torch.tensor(n)},
    "tuples of a tensor and a number": lambda n: (row(n), n),
    "arrays and booleans": lambda n: (np.full(2, n, dtype=np.float16), n % 2 == 0),
    "nothing but floats": lambda n: (0.5 * n, float(n)),
}
DIFFERENT: dict[str, Callable[[int], Any]] = {
    "integers in one batch, a float in another": lambda n: (row(n), n if n < 4 else 0.5),
    "two dtypes": lambda n: {"x": row(n).to(torch.float64 if n == 5 else torch.float32)},
    "another length in each batch": lambda n: {"x": torch.ones(1 + n // 2)},
    "other columns in a batch": lambda n: {"x": row(n), "y" if n < 4 else "z": row(n)},
    "another column in a batch": lambda n: {"x": row(n)} | ({"y": row(n)} if n > 3 else {}),
    "another type in a batch": lambda n: (row(n), row(n)) if n < 2 else {"x": row(n)},
    "lists": lambda n: {"x": [n] * (1 + n // 2)},
    "nested": lambda n: {"x": {"y": row(n)}},
    "a named tuple": lambda n: Pair(row(n), n),
    "one tensor": row,
    "text": lambda n: {"x": row(n), "text": "ab"},
}


def parted(samples: list[Any]) -> list[list[Any]]:
    return [samples[start : start + 2] for start in range(0, len(samples), 2)]


def bits(batch: Any) -> Any:
    if isinstance(batch, dict):
        return {name: bits(value) for name, value in batch.items()}
    if isinstance(batch, (tuple, list)):
        return type(batch).__name__, [bits(value) for value in batch]
    if isinstance(batch, torch.Tensor):
        dense = batch.dequantize() if batch.is_quantized else batch.to_dense()
        return batch.dtype, batch.layout, batch.shape, dense.stride(), dense.tolist()
    return batch


@pytest.mark.parametrize("collator", [stack, stack_with_labels, default_collate])
@pytest.mark.parametrize("kind", [*ALIKE, *DIFFERENT])
def test_they_are_those_of_single_calls(kind: str, collator: Any) -> None:
    samples = [(ALIKE | DIFFERENT)[kind](number) for number in range(7)]
    calls: list[int] = []

    def counted(part: list[Any]) -> Any:
        calls.append(len(part))
        return collator(part)

    parts = parted(samples)
    found = collate_together(counted, parts)
    assert [*map(bits, found)] == [*map(bits, map(collator, parts))]
    if kind in ALIKE:
        assert calls == [7]


def test_each_has_memory_of_its_own() -> None:
    first, second, *_ = collate_together(stack, parted([{"x": row(number)} for number in range(7)]))
    first["x"].zero_()
    assert second["x"].tolist() == torch.stack([row(2), row(3)]).tolist()
    assert first["x"].untyped_storage().nbytes() == first["x"].nbytes


def quantized(number: int) -> torch.Tensor:
    return torch.quantize_per_tensor(row(number), 0.1 * (number // 2 + 1), 0, torch.qint8)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
@pytest.mark.parametrize("make", [lambda number: row(number).to_sparse(), quantized])
def test_other_tensors_are_collated_by_batch(make: Callable[[int], torch.Tensor]) -> None:
    parts = parted([{"x": make(number)} for number in range(7)])
    for one, other in zip(collate_together(stack, parts), map(stack, parts), strict=True):
        assert bits(one) == bits(other)


def test_what_fits_nowhere_raises_as_alone() -> None:
    samples = [{"x": torch.ones(1 + number)} for number in range(4)]
    with pytest.raises(ValueError, match="cannot be stacked into a batch"):
        collate_together(stack, parted(samples))


def test_how_many_depends_on_the_size(monkeypatch: pytest.MonkeyPatch) -> None:
    small, large = {"x": torch.zeros(8, 4)}, {"x": torch.zeros(8, 3, 224, 224)}
    assert batches_at_once(stack, small, 8) == 64
    assert batches_at_once(stack, {"x": torch.zeros(8, 512)}, 8) == 4
    assert batches_at_once(stack, {"x": torch.zeros(8, 1024)}, 8) == 1  # too few
    assert batches_at_once(stack, large, 8) == batches_at_once(stack, {"x": torch.zeros(300, 1)}, 300) == 1
    assert batches_at_once(ColumnFilter(stack_with_labels, frozenset("x")), small, 8) == 64
    assert batches_at_once(stack, {"x": torch.zeros(1, 4)}, 1) == 1  # a dataset may return the same tensor again
    assert batches_at_once(stack, {"x": torch.zeros(8, 4).to_sparse()}, 8) == 1
    assert batches_at_once(lambda samples: stack(samples), small, 8) == 1  # may look at all samples of a batch
    monkeypatch.setattr(collate, "_TORCHS", {**torch.utils.data._utils.collate.default_collate_fn_map})
    assert batches_at_once(default_collate, small, 8) == 64
    monkeypatch.setitem(torch.utils.data._utils.collate.default_collate_fn_map, bytes, len)
    assert batches_at_once(default_collate, small, 8) == 1
