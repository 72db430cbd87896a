"""Predictions on the host: in their own dtype until the end."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from trainer_kit.loop.collected import Collected
from trainer_kit.loop.prediction import EvalPrediction
from trainer_kit.strategies.base import Strategy


def joined(collected: Collected, everywhere: bool = True) -> EvalPrediction:
    collected.gather(Strategy(), everywhere)
    return collected.prediction()


VALUES = [0.0, -0.0, 1.5, -100.0, 1e-40, 3.4e38, float("inf"), float("-inf"), float("nan")]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int64])
def test_half_precision_is_widened_exactly(dtype: torch.dtype) -> None:
    values = torch.tensor(VALUES if dtype.is_floating_point else [1, -5]).to(dtype).reshape(-1, 1)
    collected = Collected()
    collected.add(values, values[:, 0])
    collected.add(values.flip(0), values.flip(0)[:, 0])
    predictions, labels = joined(collected)
    both = torch.cat([values, values.flip(0)])
    expected = (both.float() if dtype in (torch.bfloat16, torch.float16) else both).numpy()
    assert predictions.dtype == labels.dtype == expected.dtype
    assert predictions.tobytes() == expected.tobytes()
    assert labels.tobytes() == expected.tobytes()


def test_batches_of_other_widths_are_filled_up() -> None:
    collected = Collected()
    for width in (2, 3):
        collected.add((torch.ones(1, width).bfloat16(), torch.ones(2)), torch.ones(1, width).half())
    (wide, other), labels = joined(collected, everywhere=False)
    assert wide.tolist() == labels.tolist() == [[1, 1, -100], [1, 1, 1]]
    assert wide.dtype == labels.dtype == np.float32
    assert other.tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_kept_and_gathered_as_it_is(dtype: torch.dtype) -> None:
    collected = Collected()
    collected.add(torch.ones(4, 8, dtype=dtype), None)
    assert collected.blocks[0][0].nbytes == 4 * 8 * 2


def test_a_view_does_not_keep_its_tensor() -> None:
    collected = Collected()
    logits = torch.arange(4000.0).reshape(4, 1000)
    collected.add(logits[:, -1], logits[0])
    (last, first, *_), logits = collected.blocks[0], logits.clone()
    assert last.base.nbytes if last.base is not None else last.nbytes == 16
    assert last.tolist() == logits[:, -1].tolist()
    assert first.tolist() == logits[0].tolist()


def test_nothing_is_none() -> None:
    assert [*joined(Collected())] == [None, None]
    collected = Collected()
    collected.add(torch.ones(2, 1), None)
    assert joined(collected).label_ids is None


def test_inputs_and_losses_are_kept_and_texts_filled_up_with_the_value_given() -> None:
    collected = Collected(fill=7)
    for width in (1, 2):
        ids = torch.ones(1, width, dtype=torch.int64)
        collected.add(ids, (ids[:, 0], ids), ids, torch.tensor(0.5).expand(1))
    found = joined(collected)
    assert found.predictions.tolist() == [[1, 7], [1, 1]]
    assert [each.tolist() for each in found.label_ids] == [[1, 1], [[1, -100], [1, 1]]]
    assert found.inputs.tolist() == [[1, -100], [1, 1]]
    assert found.losses.tolist() == [0.5, 0.5]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_in_dicts_is_widened(dtype: torch.dtype) -> None:
    collected = Collected()
    logits = torch.tensor([[1.5, -2.0]], dtype=dtype)
    collected.add({"logits": logits, "parts": [logits, (logits, 3)]}, None)
    found, _ = joined(collected)
    assert type(found["parts"][1]) is tuple
    for array in (found["logits"], found["parts"][0], found["parts"][1][0]):
        assert array.dtype == np.float32
        assert array.tolist() == [[1.5, -2.0]]


def test_batches_may_differ_in_dtype() -> None:
    collected = Collected()
    for dtype in (torch.bfloat16, torch.float32, torch.float16):
        collected.add(torch.ones(1, 2, dtype=dtype), torch.ones(1, dtype=dtype))
    for array in joined(collected):
        assert array.dtype == np.float32
        assert array.sum() == array.size


def test_lists_with_an_entry_for_each_sample_are_chained() -> None:
    collected = Collected()
    for first, size in ((0, 3), (3, 3), (6, 1)):
        boxes = [{"boxes": torch.full((1 + place % 2, 4), float(place))} for place in range(first, first + size)]
        classes = [torch.full((place,), place) for place in range(first, first + size)]
        collected.add(list(boxes), (tuple(boxes), classes), classes, samples=size)
    found = joined(collected)
    for entries in (found.predictions, found.label_ids[0]):
        assert type(entries) is list
        assert [each["boxes"][0, 0] for each in entries] == [0, 1, 2, 3, 4, 5, 6]
        assert [len(each["boxes"]) for each in entries] == [1, 2, 1, 2, 1, 2, 1]
    for entries in (found.label_ids[1], found.inputs):
        assert [each.tolist() for each in entries] == [[place] * place for place in range(7)]


def test_lists_and_tuples_of_columns_are_joined_by_column() -> None:
    collected = Collected()
    for size in (2, 1):
        columns = [torch.zeros(size), torch.ones(size)]
        collected.add(columns, tuple(columns), columns, samples=size)
    for zeros, ones in joined(collected):
        assert (zeros.tolist(), ones.tolist()) == ([0, 0, 0], [1, 1, 1])


def test_dicts_are_joined_by_entry() -> None:
    collected = Collected()
    for size in (2, 1):
        parts = {"a": torch.zeros(size), "b": (torch.ones(size, 2), {"c": torch.ones(size)})}
        collected.add(parts, parts, samples=size)
    for found in joined(collected):
        assert (found["a"].tolist(), found["b"][0].tolist()) == ([0, 0, 0], [[1, 1]] * 3)
        assert found["b"][1]["c"].tolist() == [1, 1, 1]


def test_dicts_of_labels_may_hold_an_entry_for_each_sample() -> None:
    collected = Collected()
    for first, size in ((0, 3), (3, 1)):
        sizes = [torch.full((place,), place) for place in range(first, first + size)]
        collected.add(torch.zeros(size), {"ragged": sizes, "ids": torch.arange(first, first + size)}, samples=size)
    labels = joined(collected).label_ids
    assert [each.tolist() for each in labels["ragged"]] == [[], [1], [2, 2], [3, 3, 3]]
    assert labels["ids"].tolist() == [0, 1, 2, 3]


def test_dicts_within_outputs_are_no_samples() -> None:
    for layers in (2, 3):
        collected = Collected()
        for _ in range(2):
            collected.add((torch.zeros(3, 2), [{"boxes": torch.zeros(3, 4)}] * layers), None, samples=3)
        logits, auxiliary = joined(collected).predictions
        assert (logits.shape, len(auxiliary)) == ((6, 2), layers)


def test_labels_that_may_be_columns_or_samples_are_refused() -> None:
    collected = Collected()
    collected.add(torch.zeros(2), [torch.zeros(2), torch.ones(2)], samples=2)
    with pytest.raises(ValueError, match="labels are a list of 2 tensors with 2 rows in a batch of 2 samples, "):
        joined(collected)


@pytest.mark.parametrize(
    ("first", "second", "text"),
    [
        ((torch.zeros(2), torch.zeros(2)), (torch.zeros(2),), "labels of different batches are 2 values and 1 values"),
        ((torch.zeros(2), torch.zeros(2)), torch.zeros(2, 2), "are 2 values and a tensor of 2 dimensions"),
        ({"a": torch.zeros(2)}, {"b": torch.zeros(2)}, "are a dict with a and a dict with b"),
    ],
)
def test_labels_that_differ_in_structure_are_refused(first: Any, second: Any, text: str) -> None:
    collected = Collected()
    for labels in (first, second):
        collected.add(torch.zeros(2), labels, samples=2)
    with pytest.raises(ValueError, match=text) as caught:
        joined(collected)
    assert "let data_collator return the same for each batch, or set eval_do_concat_batches=False" in str(caught.value)
