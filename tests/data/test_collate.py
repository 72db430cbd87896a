from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate
from torch.utils.data._utils.collate import default_collate_fn_map
from transformers import BatchEncoding, DataCollatorWithPadding, Wav2Vec2FeatureExtractor

from trainer_kit.data.collate import (
    PadCollator,
    default_collate_in_process,
    default_collator,
    stack,
    warn_of_ready_batches,
)


def tokenizer(**changes: Any) -> Any:
    return SimpleNamespace(**{"pad_token_id": 9, "padding_side": "right", "pad_token_type_id": 3, **changes})


def same(left: Any, right: Any) -> bool:
    """Equal values of equal kinds."""
    if isinstance(left, torch.Tensor):
        return isinstance(right, torch.Tensor) and left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, (tuple, list)):
        return len(left) == len(right) and all(same(one, other) for one, other in zip(left, right, strict=True))
    return bool(left == right)


class Pair(NamedTuple):
    x: Any
    y: Any


@pytest.mark.parametrize(
    ("samples", "expected"),
    [
        ([{"x": torch.ones(2), "y": torch.tensor(1)}] * 2, {"x": torch.ones(2, 2), "y": torch.tensor([1, 1])}),
        ([{"x": [1, 2], "labels": 0}, {"x": [3, 4], "labels": 5}],
         {"x": torch.tensor([[1, 2], [3, 4]]), "labels": torch.tensor([0, 5])}),
        ([{"x": np.ones(2, np.float32)}] * 2, {"x": torch.ones(2, 2)}),
        ([{"x": [[1, 2], [3, 4]]}] * 2, {"x": torch.tensor([[[1, 2], [3, 4]]] * 2)}),
        ([{"text": "a"}, {"text": "b"}], {"text": ["a", "b"]}),
        ([{"x": {"deep": [1, 2]}}, {"x": {"deep": [3, 4]}}], {"x": {"deep": torch.tensor([[1, 2], [3, 4]])}}),
        ([(torch.ones(2), 0), (torch.ones(2), 1)], (torch.ones(2, 2), torch.tensor([0, 1]))),
        ([([1, 2], 0), ([3, 4], 1)], (torch.tensor([[1, 2], [3, 4]]), torch.tensor([0, 1]))),
        ([torch.ones(2), torch.zeros(2)], torch.tensor([[1.0, 1.0], [0.0, 0.0]])),
        ([1, 2], torch.tensor([1, 2])),
        ([True, False], torch.tensor([True, False])),
    ],
)  # fmt: skip
def test_stacking(samples: list[Any], expected: Any) -> None:
    assert same(stack(samples), expected)


def test_python_floats_have_the_dtype_that_models_have() -> None:
    batch = stack([{"x": [0.5, 1.0], "y": 0.5}, {"x": [1, 2], "y": 1}])
    assert batch["x"].dtype == batch["y"].dtype == torch.float32
    assert batch["x"].tolist() == [[0.5, 1.0], [1.0, 2.0]]
    batch = stack([{"y": 1}, {"y": 0.5}])  # the first one is no float
    assert batch["y"].tolist() == [1.0, 0.5]


def test_numpy_keeps_its_dtype() -> None:
    assert stack([{"x": np.float64(1)}] * 2)["x"].dtype == torch.float64
    assert stack([{"x": np.ones(1)}] * 2)["x"].dtype == torch.float64


def test_named_tuples_and_mappings_are_stacked_by_entry() -> None:
    batch = stack([Pair(torch.ones(2), 0), Pair(torch.ones(2), 1)])
    assert isinstance(batch, Pair)
    assert batch.y.tolist() == [0, 1]
    assert stack([BatchEncoding({"input_ids": [1, 2]})] * 2)["input_ids"].tolist() == [[1, 2], [1, 2]]


class Row:
    """A sample as a table gives it, which torch cannot collate."""


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        ([{"x": torch.ones(2)}, {"x": torch.ones(3)}], "'x'.*different lengths need processing_class"),
        ([{"x": [1, 2]}, {"x": [1, 2, 3]}], "'x'.*different lengths need processing_class"),
        ([(torch.ones(2), 0), (torch.ones(3), 0)], "different lengths need processing_class"),
        ([torch.ones(2), torch.ones(3)], "different lengths need processing_class"),
        ([{"x": torch.ones(2)}, {"y": torch.ones(2)}], r"different columns.*\['x'\], \['y'\]"),
        ([{"x": torch.ones(2)}, {"x": torch.ones(2), "y": torch.ones(2)}], "different columns"),
        ([{"x": torch.ones(2), "y": torch.ones(2)}, {"x": torch.ones(2)}], "different columns"),
        ([{"x": 1}, {"x": 1, "y": 1}], "different columns"),
        ([{"x": None}, {"x": None}], "'x'.*NoneType"),
        (
            [{"x": Row()}, {"x": Row()}],
            r"'x'.*found <class '.*Row'>; convert it to one of these in the dataset",
        ),
        (
            [Row(), Row()],
            r"found <class '.*Row'>; convert it to one of these in the dataset, or give a",
        ),
        ([{"x": 1}, {"x": None}], "'x'"),
        ([{"x": 1}, 5], "different"),
        ([(1, 2), (1, 2, 3)], "samples cannot be stacked"),
    ],
)
def test_what_cannot_be_stacked_is_refused_with_the_column(samples: list[Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        stack(samples)


def test_padding_fills_each_column_with_its_own() -> None:
    samples = [
        {"input_ids": [1, 2, 3], "token_type_ids": [0, 0, 1], "labels": [4, 5, 6], "other": [1, 1, 1]},
        {"input_ids": [7], "token_type_ids": [0], "labels": [8], "other": [1]},
    ]
    batch = PadCollator(tokenizer())(samples)
    assert {name: column.tolist() for name, column in batch.items()} == {
        "input_ids": [[1, 2, 3], [7, 9, 9]],
        "token_type_ids": [[0, 0, 1], [0, 3, 3]],
        "labels": [[4, 5, 6], [8, -100, -100]],
        "other": [[1, 1, 1], [1, 0, 0]],
        "attention_mask": [[1, 1, 1], [1, 0, 0]],
    }
    assert all(column.dtype == torch.int64 for column in batch.values())
    batch = PadCollator(tokenizer(padding_side="left"))(samples)
    assert batch["input_ids"].tolist() == [[1, 2, 3], [9, 9, 7]]
    assert batch["labels"].tolist() == [[4, 5, 6], [-100, -100, 8]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [0, 0, 1]]


@pytest.mark.parametrize(("multiple", "length"), [(None, 3), (1, 3), (2, 4), (3, 3), (8, 8)])
def test_padding_to_a_multiple(multiple: int | None, length: int) -> None:
    batch = default_collator(tokenizer(), multiple)([{"input_ids": [1, 2, 3]}, {"input_ids": [1]}])
    assert batch["input_ids"].shape == batch["attention_mask"].shape == (2, length)


@pytest.mark.parametrize(("longest", "length"), [(1, 4), (4, 4), (5, 10), (10, 10)])
def test_padding_to_one_of_some_lengths(longest: int, length: int) -> None:
    collate = default_collator(tokenizer(), pad_to_lengths=[10, 4], static_shapes=True)
    batch = collate([{"input_ids": [1] * longest, "labels": 1}, {"input_ids": [1], "labels": 0}])
    assert batch["input_ids"].shape == batch["attention_mask"].shape == (2, length)
    assert batch["labels"].tolist() == [1, 0]


def test_a_sample_beyond_all_lengths_is_refused() -> None:
    collate = default_collator(tokenizer(), pad_to_lengths=[4, 10])
    with pytest.raises(ValueError, match=r"^a sample's column 'input_ids' has a length of 11, above the largest of "
                       r"pad_to_lengths=\[4, 10\]; add a larger one"):  # fmt: skip
        collate([{"input_ids": [1] * 11}])


@pytest.mark.parametrize(
    ("longest", "limit", "length"),
    [(1, None, 32), (32, None, 32), (33, None, 64), (700, None, 1024), (700, 10**30, 1024), (700, 768, 768),
     (33, 768, 64), (7, 20, 20), (20, 20, 20), (21, 20, 32), (40, 20, 64)],
)  # fmt: skip
def test_static_shapes_pad_to_powers_of_two(longest: int, limit: int | None, length: int) -> None:
    given = {} if limit is None else {"model_max_length": limit}
    collate = default_collator(tokenizer(**given), static_shapes=True)
    assert collate([{"input_ids": [1] * longest}, {"input_ids": [2]}])["input_ids"].shape == (2, length)
    assert default_collator(tokenizer(**given), 5, static_shapes=True)([{"input_ids": [1]}])["input_ids"].shape == (
        1,
        5,
    )
    assert default_collator(tokenizer(**given))([{"input_ids": [1]}])["input_ids"].shape == (1, 1)


def test_an_attention_mask_of_the_dataset_is_kept() -> None:
    batch = PadCollator(tokenizer())([{"input_ids": [1, 2, 3], "attention_mask": [1, 0, 1]}])
    assert batch["attention_mask"].tolist() == [[1, 0, 1]]


def test_label_becomes_labels_and_is_stacked() -> None:
    batch = PadCollator(tokenizer())([{"input_ids": [1], "label": 2}, {"input_ids": [1, 2], "label": 0}])
    assert list(batch) == ["input_ids", "labels", "attention_mask"]
    assert batch["labels"].tolist() == [2, 0]
    both = PadCollator(tokenizer())([{"input_ids": [1], "label": 2, "labels": [5]}])
    assert both["label"].tolist() == [2]
    assert both["labels"].tolist() == [[5]]


def test_tensors_arrays_and_further_dimensions_are_padded() -> None:
    batch = PadCollator(tokenizer(), 4)(
        [
            {"input_ids": torch.tensor([1, 2]), "bbox": np.ones((2, 4), np.int64), "score": torch.tensor(0.5)},
            {"input_ids": torch.tensor([3]), "bbox": np.ones((1, 4), np.int64), "score": torch.tensor(1.5)},
        ]
    )
    assert batch["input_ids"].tolist() == [[1, 2, 9, 9], [3, 9, 9, 9]]
    assert batch["bbox"].shape == (2, 4, 4)  # rounded up as the tokens are, beside which it stands
    assert batch["bbox"][1, 1:].eq(0).all()
    assert batch["score"].tolist() == [0.5, 1.5]


def test_padding_loses_no_fraction_and_no_dtype() -> None:
    batch = PadCollator(tokenizer())([{"input_ids": [1], "speed": [1]}, {"input_ids": [1, 2], "speed": [0.5, 0.25]}])
    assert batch["speed"].tolist() == [[1.0, 0.0], [0.5, 0.25]]
    batch = PadCollator(tokenizer())([{"input_ids": []}, {"input_ids": [1, 2]}])  # an empty list has no dtype
    assert batch["input_ids"].dtype == torch.int64
    assert batch["input_ids"].tolist() == [[9, 9], [1, 2]]
    assert PadCollator(tokenizer())([{"y": 0.5}, {"y": 1}])["y"].dtype == torch.float32


def test_strings_stay_lists() -> None:
    batch = PadCollator(tokenizer())([{"input_ids": [1], "text": "a"}, {"input_ids": [2], "text": "b"}])
    assert batch["text"] == ["a", "b"]


def test_batch_encodings_are_samples_too() -> None:
    assert PadCollator(tokenizer())([BatchEncoding({"input_ids": [1, 2]})])["input_ids"].tolist() == [[1, 2]]


@pytest.mark.parametrize(
    ("samples", "error", "message"),
    [
        ([(1, 2)], TypeError, "a sample is a tuple; with a tokenizer samples must be dicts"),
        ([{"input_ids": [1]}, {"input_ids": [1], "labels": [1]}], ValueError, "different columns"),
        ([{"words": ["a", "b"]}, {"words": ["c"]}], ValueError, "'words'"),
        ([{"bbox": np.ones((2, 4))}, {"bbox": np.ones((2, 3))}], ValueError, "'bbox'"),
        ([{"x": [1, 2]}, {"x": 3}], ValueError, "'x'"),
    ],
)
def test_what_cannot_be_padded_is_refused_with_the_column(
    samples: list[Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        PadCollator(tokenizer())(samples)


def test_which_collator_is_the_default() -> None:
    assert default_collator() is stack
    assert default_collator(SimpleNamespace(image_mean=[0.5])) is stack  # an image processor pads nothing
    assert isinstance(default_collator(tokenizer()), PadCollator)
    with pytest.raises(ValueError, match="SimpleNamespace has no padding token"):
        default_collator(tokenizer(pad_token_id=None))
    with pytest.raises(ValueError, match="pad_to_multiple_of=8 needs a tokenizer"):
        default_collator(None, 8)
    with pytest.raises(ValueError, match=r"pad_to_lengths=\[8\] needs a tokenizer"):
        default_collator(None, pad_to_lengths=[8])
    with pytest.raises(ValueError, match=r"pad_to_multiple_of=8 and pad_to_lengths=\[8\] contradict"):
        default_collator(tokenizer(), 8, pad_to_lengths=[8])


ONES = torch.ones


@pytest.mark.parametrize(
    ("sample", "is_doubtful"),
    [
        ({"x": ONES(4, 3), "labels": ONES(4)}, True),
        ((ONES(4, 3, 8, 8), ONES(4)), True),
        ({"x": np.ones((4, 3)), "labels": np.ones(4)}, True),
        ({"input_ids": ONES(7), "labels": ONES(7)}, False),  # tokens
        ({"x": ONES(4, 3), "labels": torch.tensor(1)}, False),  # choices
        ({"x": ONES(1, 3), "labels": ONES(1)}, False),
        ({"x": ONES(3, 8, 8), "y": ONES(3, 8, 8)}, False),  # pictures
        ({"x": ONES(4, 3), "labels": ONES(5)}, False),
        ({"x": ONES(4, 3), "name": "text"}, False),
        (ONES(4, 3), False),
    ],
)
def test_samples_that_may_be_batches_warn(sample: Any, is_doubtful: bool) -> None:
    context = pytest.warns(UserWarning, match="length 4: .*ReadyBatches") if is_doubtful else contextlib.nullcontext()
    with context:
        warn_of_ready_batches("train_dataset", sample, stack)
    warn_of_ready_batches("train_dataset", sample, default_collate)


@pytest.mark.parametrize("kind", [np.asarray, torch.tensor, list])
def test_feature_extractors_pad_as_in_transformers(kind: Any) -> None:
    samples = [{"input_values": kind([1.0] * (2 + place)), "label": place} for place in range(3)]
    extractor = Wav2Vec2FeatureExtractor(return_attention_mask=True)
    batch = default_collator(extractor, pad_to_multiple_of=3)(samples)
    assert batch["input_values"].tolist() == [[1, 1, 0, 0, 0, 0], [1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 0, 0]]
    assert batch["attention_mask"].sum(1).tolist() == [2, 3, 4]
    assert batch["labels"].tolist() == [0, 1, 2]
    theirs = DataCollatorWithPadding(extractor, pad_to_multiple_of=3)(samples)
    assert same(dict(batch), dict(theirs))
    with pytest.raises(ValueError, match="needs a tokenizer to pad with"):
        default_collator(extractor, pad_to_lengths=[8])


def _samples(kind: str, count: int = 3) -> list[Any]:
    x = [torch.arange(4.0) + number for number in range(count)]
    y = [torch.tensor(number) for number in range(count)]
    made: dict[str, Callable[[int], Any]] = {
        "tuple": lambda n: (x[n], y[n]),
        "list": lambda n: [x[n], y[n]],
        "dict": lambda n: {"x": x[n], "y": y[n]},
        "named": lambda n: Pair(x[n], y[n]),
        "ordered": lambda n: OrderedDict(x=x[n], y=y[n]),
        "other order": lambda n: dict(reversed([("x", x[n]), ("y", y[n])]) if n else [("x", x[n]), ("y", y[n])]),
        "tensor": lambda n: x[n],
        "numbers": lambda n: (x[n], n),
        "arrays": lambda n: {"x": x[n].numpy(), "y": n * 0.5},
        "texts": lambda n: (str(n), x[n]),
        "nested": lambda n: (x[n], {"y": y[n]}),
        "empty": lambda n: (),
        "parameter": lambda n: (torch.nn.Parameter(x[n]), y[n]),
        "sparse": lambda n: (x[n].to_sparse(), y[n]),
        "several dtypes": lambda n: (x[n].double() if n else x[n], y[n]),
        "ragged": lambda n: (x[n][: n + 1], y[n]),
        "longer": lambda n: (x[n], y[n], *[y[n]] * n),
        "shorter": lambda n: (x[n], y[n])[: 2 - n],
        "more columns": lambda n: {"x": x[n], "y": y[n], **({"z": y[n]} if n else {})},
        "fewer columns": lambda n: {"x": x[n], **({} if n else {"y": y[n]})},
        "none": lambda n: (x[n], None if n else y[n]),
    }
    return [made[kind](number) for number in range(count)]


KINDS = [
    *("tuple", "list", "dict", "named", "ordered", "other order", "tensor", "numbers", "arrays", "texts", "nested"),
    *("empty", "parameter", "sparse", "several dtypes", "ragged", "longer", "shorter"),
    *("more columns", "fewer columns", "none"),
]


def _outcome(collate: Callable[[list[Any]], Any], samples: list[Any]) -> str:
    try:
        return repr(collate(samples))
    except Exception as error:
        return repr(error)


@pytest.mark.parametrize("kind", KINDS)
def test_the_quick_default_collate_is_torchs(kind: str) -> None:
    samples = _samples(kind)
    assert _outcome(default_collate_in_process, samples) == _outcome(default_collate, samples)


def test_the_quick_default_collate_keeps_to_a_replaced_function(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(default_collate_fn_map, torch.Tensor, lambda batch, *, collate_fn_map: "mine")
    assert default_collate_in_process(_samples("tuple")) == ["mine", "mine"]


def test_the_quick_default_collate_keeps_to_an_added_function(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(default_collate_fn_map, tuple, lambda batch, *, collate_fn_map: "mine")
    assert default_collate_in_process(_samples("tuple")) == "mine"
