"""What a batch counts, on the host and on a device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from kit.loss_cases import (
    EXACT,
    Tokenizer,
    made,
    make_trainer,
    tokens_with_labels,
)
from torch.nn.utils.rnn import pack_sequence

from trainer_kit import ReadyBatches, Trainer, TrainingArguments
from trainer_kit.loss import batch as batch_module
from trainer_kit.loss.batch import Counts, count, labels_of, samples_in, samples_of, targets_of, with_labels


def test_counts() -> None:
    ids = torch.tensor([[5, 6, 7], [8, 0, 0]])
    labels = torch.tensor([[5, -100, 7], [8, -100, -100]])
    batch = {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": labels}
    assert count(batch, 2) == Counts(samples=2, tokens=4, labels=3, shifted=1)
    assert count({"input_ids": ids}, 2) == Counts(2, 6, 2, 2)
    assert count({"x": ids, "label": torch.tensor([1, -100])}, 2) == Counts(2, 0, 1, 1)
    assert count((ids, torch.tensor([1, -100])), 2) == Counts(2, 0, 1, 1)
    assert count([ids, torch.tensor([0.5, -100.0])], 2) == Counts(2, 0, 2, 2)
    assert count(ids, 2) == Counts(2, 0, 2, 2)
    assert count((ids,), 2) == Counts(2, 0, 2, 2)
    assert count({"x": ids, "labels": torch.tensor([True, False])}, 2) == Counts(2, 0, 2, 2)
    assert count({"x": ids, "labels": torch.zeros(2, 3, 4, dtype=torch.int32)}, 2) == Counts(2, 0, 24, 18)


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.int32, torch.int64])
@pytest.mark.parametrize("shape", [(0,), (1,), (63,), (64,), (65,), (8, 8), (8, 9), (2, 3, 4), (0, 5)])
def test_few_labels_are_counted_as_many_are(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    labels = torch.randint(-101, -98, shape, dtype=dtype, generator=torch.Generator().manual_seed(0))
    for each in (labels, labels.T if labels.ndim == 2 else labels.flip(0)):
        counts = count({"labels": each}, 2)
        assert (type(counts.labels), counts.labels) == (int, int((each != -100).sum()))
        assert counts.shifted == int((each[..., 1:] if each.ndim > 1 else each).ne(-100).sum())


def test_samples_are_those_that_were_collated() -> None:
    """The first dimension of the first tensor may be nodes of graphs, objects in images, or channels."""
    graphs = {"nodes": torch.zeros(32, 3), "labels": torch.tensor([0.5, 0.1])}
    assert count(graphs, 2) == Counts(2, 0, 2, 2)
    assert count([[torch.zeros(3, 8, 8)] * 5, [{"boxes": torch.zeros(2, 4)}] * 5], 5) == Counts(5, 0, 5, 5)
    assert count({"text": ["a", "b"]}, 2) == Counts(2, 0, 2, 2)
    packed = {"input_ids": torch.ones(1, 6), "labels": torch.tensor([[-100, 1, 2, -100, 4, 5]])}
    assert count(packed, 2) == Counts(2, 6, 4, 4)


@pytest.mark.parametrize("is_sorted", [True, False])
def test_a_packed_sequence_has_no_labels(is_sorted: bool) -> None:
    batch = pack_sequence([torch.ones(3, 2), torch.ones(2, 2)], enforce_sorted=is_sorted)
    assert labels_of(batch) is None
    assert targets_of(batch, None) is None
    assert count(batch, 2) == Counts(2, 0, 2, 2)


@pytest.mark.parametrize("batch", [{}, {"text": ["a"]}, "text", {"x": torch.tensor(1)}, ()])
def test_a_batch_whose_samples_cannot_be_counted_is_refused(batch: Any) -> None:
    with pytest.raises(ValueError, match="its samples cannot be counted"):
        samples_of(batch)


def test_which_entry_holds_the_labels() -> None:
    one, two = torch.zeros(1), torch.ones(1)
    assert labels_of({"labels": one, "label": two}) is one
    assert labels_of({"labels": None, "label": two}) is two
    assert labels_of({"y": two}) is None
    assert labels_of((one, two)) is two
    assert labels_of(one) is None
    assert labels_of({"labels": [one]}) is None


@pytest.mark.parametrize("case", ["gpt2", "plain"])
def test_counts_on_a_device_give_the_same(case: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = [3, 1, 5, 2, 2, 7]
    samples = [tokens_with_labels(list(range(2, 2 + length)), [length != 2] * length) for length in lengths]

    def gradients() -> list[torch.Tensor]:
        trainer, recorder = make_trainer(
            made(case), str(tmp_path), samples, processing_class=Tokenizer(), per_device_train_batch_size=1,
            gradient_accumulation_steps=2,
        )  # fmt: skip
        trainer.train()
        return recorder.gradients

    expected = gradients()
    monkeypatch.setattr(batch_module, "_count_labels", lambda labels: (labels != -100).sum())
    for found, wanted in zip(gradients(), expected, strict=True):
        torch.testing.assert_close(found, wanted, **EXACT)


@pytest.mark.parametrize(
    ("batch", "columns", "expected"),
    [
        ({"x": 0, "class_labels": 1}, ["class_labels"], 1),
        ({"x": 0, "class_labels": 1, "mask_labels": 2}, ["mask_labels", "class_labels", "more_labels"], (2, 1)),
        ({"labels": torch.tensor(5), "class_labels": 1}, ["labels", "class_labels"], torch.tensor(5)),
        ({"start_positions": 1, "end_positions": 2, "class_labels": 3}, ["class_labels"], (1, 2)),
        ({"x": 0, "labels": [{"boxes": 1}]}, [], [{"boxes": 1}]),
        ([[0, 0], ({"boxes": 1}, {"boxes": 2})], [], ({"boxes": 1}, {"boxes": 2})),
        ([torch.zeros(2), ["a", "b"]], [], None),
        ({"x": 0, "label": 1}, [], None),
    ],
)
def test_default_targets(batch: Any, columns: list[str], expected: Any) -> None:
    assert targets_of(batch, None, columns) == expected


@pytest.mark.parametrize(
    "labels",
    [
        [torch.zeros(2), torch.ones(2)],
        (torch.zeros(2), {"b": [torch.ones(2)]}),
        {"a": torch.zeros(2), "b": torch.ones(2)},
    ],
)
def test_default_targets_may_be_nested(labels: Any) -> None:
    assert targets_of([torch.zeros(2), labels], None) is labels
    assert targets_of({"x": torch.zeros(2), "labels": labels}, None) is labels


class Named(NamedTuple):
    x: torch.Tensor
    labels: torch.Tensor
    weight: torch.Tensor


class Classic(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor
    weight: torch.Tensor


class Points(NamedTuple):
    x: torch.Tensor
    target: torch.Tensor
    y: torch.Tensor


class Unnamed(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor


@pytest.mark.parametrize(("kind", "place"), [(Named, 1), (Classic, 1), (Points, 1), (Unnamed, 1)])
def test_labels_of_named_tuples(kind: Any, place: int) -> None:
    values = [torch.arange(6.0), torch.tensor([3, -100, 4, 5, -100, 6]), torch.ones(6)][: len(kind._fields)]
    batch = kind(*values)
    assert labels_of(batch) is values[place] is targets_of(batch, None)
    assert count(batch, 6).labels == 4
    changed = with_labels(batch, torch.zeros(6))
    assert type(changed) is kind
    assert [each is old for each, old in zip(changed, values, strict=True)] == [
        number != place for number in range(len(values))
    ]
    assert changed[place].tolist() == [0] * 6


def test_ready_batches_without_tensors_are_refused() -> None:
    batch = {"id": np.arange(4), "x": np.ones((4, 2))}
    with pytest.raises(ValueError, match=r"ReadyBatches must give tensors .* numpy arrays by torch\.as_tensor"):
        samples_in(batch)
    with pytest.raises(ValueError, match="its samples cannot be counted") as caught:
        samples_in({"id": 3})
    assert "numpy" not in str(caught.value)
    assert samples_in({name: torch.as_tensor(array) for name, array in batch.items()}) == 4


class Padded(NamedTuple):
    data: torch.Tensor
    lengths: torch.Tensor


class Columns:
    """A batch with a length, as speechbrain's PaddedBatch; its iteration yields columns."""

    def __init__(self, length: int, **columns: Any) -> None:
        self._keys, self._length = [*columns], length
        vars(self).update(columns)

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Any]:
        return iter([vars(self)[key] for key in self._keys])

    def to(self, device: Any, non_blocking: bool = False) -> Columns:
        return self


def rows(samples: int) -> dict[str, Any]:
    padded = Padded(torch.ones(samples, 7), torch.ones(samples))
    return {"sig": padded, "id": ["a"] * samples, "lab": torch.arange(samples), "rate": 16, "scale": torch.tensor(1.0)}


@pytest.mark.parametrize("samples", [4, 5, 1])
def test_the_length_of_an_object_with_columns_of_this_length(samples: int) -> None:
    assert samples_in(Columns(samples, **rows(samples))) == samples
    assert samples_in(Columns(samples, **rows(samples), info={"size": [224, 224], "name": "a"})) == samples


@pytest.mark.parametrize(
    "changes", [{}, {"sig": torch.ones(7, 5)}, {"names": ["a"]}, {"lab": np.ones(4)}, {"extra": (1, 2, 3)}], ids=str
)
def test_a_length_that_is_not_that_of_all_columns_is_no_number_of_samples(changes: dict[str, Any]) -> None:
    columns = rows(5) | changes
    with pytest.raises(ValueError, match=r"give train_dataset=loader\.dataset, data_collator="):
        samples_in(Columns(4 if not changes else 5, **columns))


def test_a_length_without_columns_is_no_number_of_samples() -> None:
    with pytest.raises(ValueError, match="its samples cannot be counted"):
        samples_in(Columns(3, a=1, b=torch.tensor(2.0), c="abc"))


def test_a_run_on_objects_with_a_length(tmp_path: Any) -> None:
    batches = [Columns(each, **rows(each)) for each in (4, 4, 2)]
    args = TrainingArguments(
        str(tmp_path), num_train_epochs=1, gradient_accumulation_steps=3, learning_rate=0.0, use_cpu=True,
        report_to="none", save_strategy="no", disable_tqdm=True, log_level="error",
    )  # fmt: skip
    trainer = Trainer(
        torch.nn.Linear(7, 1),
        args,
        ReadyBatches(batches),
        compute_loss=lambda model, batch: model(batch.sig.data).mean(),
    )
    trainer.train()
    assert trainer.run.state.samples == 10
