from __future__ import annotations

from collections import UserDict
from typing import Any

import pytest
import torch

from trainer_kit.strategies import batch_shapes
from trainer_kit.strategies.base import Strategy
from trainer_kit.strategies.batch_shapes import BatchShape, ShapeLedger


def text(rows: int, length: int) -> dict[str, torch.Tensor]:
    ids = torch.zeros(rows, length, dtype=torch.int64)
    return {"input_ids": ids, "attention_mask": ids, "labels": torch.zeros(rows, dtype=torch.int64)}


def ledger_of(*batches: Any, evaluation: tuple[Any, ...] = (), padded: bool = False) -> ShapeLedger:
    ledger = ShapeLedger(padded)
    for batch in batches:
        ledger.record(batch)
    with torch.no_grad():
        for batch in evaluation:
            ledger.record(batch)
    return ledger


def test_shapes_are_counted_by_kind() -> None:
    ledger = ledger_of(text(8, 16), text(8, 16), text(6, 16), text(8, 16), evaluation=(text(8, 16), text(2, 16)))
    assert [(each.kind, each.count, each.first) for each in ledger.of("training")] == [
        ("training", 3, 1),
        ("training", 1, 3),
    ]
    assert [(each.count, each.first) for each in ledger.of("evaluation")] == [(1, 5), (1, 6)]
    assert ledger.of("training")[1].columns["labels"] == ((6,), torch.int64)
    assert (len(ledger), ledger.batches, ledger.newest) == (4, 6, ledger.of("evaluation")[1])
    assert ledger.graphs == 5


def test_each_strategy_records_what_it_moves() -> None:
    strategy = Strategy()
    strategy.to_device(text(8, 16))
    strategy.to_device(text(4, 16))
    assert len(strategy.shapes) == 2
    assert not strategy.shapes.padded


@pytest.mark.parametrize(
    ("batch", "names"),
    [
        (torch.zeros(2), {"the batch"}),
        ((torch.zeros(2), [torch.zeros(2)]), {"0", "1.0"}),
        ({"inputs": {"pixels": torch.zeros(2)}, "text": ["a", "b"], "scale": 0.5}, {"inputs.pixels"}),
        (UserDict(x=torch.zeros(2)), {"x"}),
    ],
)
def test_tensors_are_found_wherever_they_are(batch: Any, names: set[str]) -> None:
    ledger = ledger_of(batch)
    assert ledger.newest is not None
    assert ledger.newest.columns == dict.fromkeys(names, ((2,), torch.float32))


@pytest.mark.parametrize(
    "layout",
    [torch.jagged, pytest.param(torch.strided, marks=pytest.mark.filterwarnings("ignore:The PyTorch API of nested"))],
)
def test_a_nested_tensor_counts_by_all_its_values(layout: torch.layout) -> None:
    def batch(*lengths: int) -> dict[str, torch.Tensor]:
        return {"x": torch.nested.nested_tensor([torch.zeros(length, 4) for length in lengths], layout=layout)}

    ledger = ledger_of(batch(2, 3), batch(4, 1), batch(2, 2))
    assert [(each.count, each.elements) for each in ledger.of("training")] == [(2, 20), (1, 16)]


def test_batches_are_moved_to_evaluation_one_by_one() -> None:
    ledger = ledger_of(text(8, 16), text(8, 16), text(6, 16), evaluation=(text(6, 16),))
    eight, six = ledger.of("training")
    ledger.mark_evaluation(eight)
    ledger.mark_evaluation(six)
    assert [(each.count, each.first) for each in ledger.of("training")] == [(1, 1)]
    assert [(each.columns["labels"][0], each.count) for each in ledger.of("evaluation")] == [((6,), 2), ((8,), 1)]
    ledger.mark_evaluation(ledger.of("evaluation")[0])  # it is one already
    assert [each.count for each in ledger.of("evaluation")] == [2, 1]


def test_a_shape_that_was_for_evaluation_alone_comes_again_for_training() -> None:
    ledger = ledger_of(text(8, 16))
    (eight,) = ledger.of("training")
    ledger.mark_evaluation(eight)
    assert (len(ledger), ledger.of("training")) == (1, [])
    ledger.record(text(6, 16))
    ledger.record(text(8, 16))
    assert [(each.first, each.columns["labels"][0]) for each in ledger.of("training")] == [(2, (6,)), (3, (8,))]
    assert ledger.newest is ledger.of("training")[1]


def test_an_evaluation_by_hand_takes_one_place_a_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_shapes, "_MOST", 5)
    ledger = ShapeLedger(by_hand=True)
    for rows in range(1, 6):
        kept = []
        for _ in range(3):
            ledger.record(text(rows, 16))
            assert ledger.latest is not None
            kept.append(ledger.latest)
            ledger.mark_evaluation(ledger.latest)
        assert kept == [kept[0]] * 3
        assert all(each is kept[0] for each in kept), "made once"
    assert (len(ledger), len(ledger.of("evaluation")), ledger.complete) == (5, 5, True)
    ledger.record(text(6, 16))
    assert not ledger.complete


def test_another_dtype_or_column_is_another_shape() -> None:
    x = torch.zeros(2, 3)
    ledger = ledger_of({"x": x}, {"x": x.double()}, {"x": x, "y": x}, {"x": x[0]}, {"x": x})
    assert len(ledger) == 4
    assert "In training x and y are not of the same kind in all batches: give all batches the same" in ledger.advice()


def test_a_batch_that_is_not_full_is_named_with_its_remedy() -> None:
    x = torch.zeros(32, 4)
    ledger = ledger_of(
        *[{"x": x, "y": x[:, 0]}] * 7, {"x": x[:26], "y": x[:26, 0]}, evaluation=({"x": x}, {"x": x[:9]})
    )
    advice = ledger.advice()
    assert advice.startswith(
        "Batches came in 2 shapes in training and 2 in evaluation, for which, as they are, a TPU would compile about 5 "
        "graphs (one for each, and the first of training twice"
    )
    assert "In training the number of rows of x and y varies (32 in 7 batches, 26 in 1): set dataloader_drop" in advice
    assert (
        "In evaluation the number of rows of x varies (32 in 1 batch, 9 in 1): take a per_device_eval_batch" in advice
    )
    assert advice.endswith("that would leave about 3.")


def test_lengths_of_text_are_named_with_those_to_pad_to() -> None:
    lengths = [17, 30, 33, 64, 65, 100, 128, 20]
    advice = ledger_of(*(text(8, length) for length in lengths)).advice()
    assert "8 shapes in training and 0 in evaluation" in advice
    assert "dimension 1 of input_ids and attention_mask varies (8 sizes from 17 to 128)" in advice
    assert "pad_to_lengths=[32, 64, 128] or pad_to_multiple_of=128" in advice
    assert "labels" not in advice
    assert advice.endswith("that would leave about 4.")


def test_lengths_that_are_padded_already_are_not_proposed_again() -> None:
    advice = ledger_of(*(text(8, length) for length in (32, 64, 128))).advice()
    assert "pad_to_lengths=[128] or pad_to_multiple_of=128" in advice


def test_what_loaders_have_padded_already_is_not_promised_again() -> None:
    batches = [text(8, 16), text(6, 16)]
    assert "strategy='xla'" in ledger_of(*batches).advice()
    assert "strategy='xla'" not in ledger_of(*batches, padded=True).advice()


def test_where_nothing_varies_nothing_is_to_be_changed() -> None:
    assert "no batch has been seen yet" in ShapeLedger().advice()
    advice = ledger_of(text(8, 16), evaluation=(text(8, 16),)).advice()
    assert "1 shape in training and 1 in evaluation" in advice
    assert "about 3 graphs" in advice
    assert advice.endswith("No shape varies, and nothing is to be changed.")
    assert "twice" not in ledger_of(evaluation=(text(8, 16),)).advice()


def test_memory_stays_flat_where_each_batch_has_a_shape_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_shapes, "_MOST", 5)
    ledger = ledger_of(*(text(8, length) for length in range(1, 10)))
    assert (len(ledger), ledger.batches, ledger.complete) == (5, 9, False)
    assert ledger.newest is not None
    assert ledger.newest.columns["input_ids"][0] == (8, 9)  # it is told all the same
    assert "more than 5 shapes" in ledger.advice()
    assert "more than 6 graphs" in ledger.advice()


def contrast(*batches: Any) -> tuple[str, str]:
    ledger = ledger_of(*batches)
    assert isinstance(ledger.newest, BatchShape)
    against = ledger.against_usual(ledger.newest)
    assert against is not None
    return against


def test_a_new_shape_is_held_against_the_usual_one() -> None:
    difference, change = contrast(text(4, 16), text(8, 16), text(8, 16), text(8, 24))
    assert difference == "input_ids and attention_mask are [8, 24] instead of [8, 16]"
    assert "pad_to_lengths=[32]" in change
    assert "drop_last" not in change
    x = torch.zeros(2, 3)
    assert contrast({"x": x}, {"x": x.int()})[0] == "x is torch.int32 instead of torch.float32"
    difference, change = contrast({"x": x}, {"y": x})
    assert difference == "y is here and mostly not, x is missing"
    assert change.startswith("give all batches the same columns")
    six = dict.fromkeys("abcdef", x)
    assert contrast(six, dict.fromkeys(six, x[:1]))[0] == "a, b, c and 3 more are [1, 3] instead of [2, 3]"


def test_the_only_shape_of_its_kind_differs_from_none() -> None:
    ledger = ledger_of(text(8, 16), evaluation=(text(8, 16),))
    assert ledger.newest is not None
    assert ledger.against_usual(ledger.newest) is None
