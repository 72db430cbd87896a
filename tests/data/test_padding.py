"""Batches that are filled up, where shapes are to be static, change neither losses nor gradients."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from loss_cases import CASES, EXACT, Points, Tokenizer, made, make_trainer, points
from static_shapes import STATIC, OnFour, Static
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.data import IterableDataset
from transformers import BatchEncoding

from trainer_kit import SingleDevice
from trainer_kit.data.map_loader import GlobalBatch, MicroBatch
from trainer_kit.data.padding import Padding, pad_rows, trim_rows
from trainer_kit.loss.batch import count
from trainer_kit.loss.loss import Loss
from trainer_kit.loss.probe import LossProbe

relaxed = settings(max_examples=6, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
lengths = st.integers(1, 20)
batch_sizes = st.integers(1, 8)
accumulations = st.integers(1, 3)


class Classifier(Points):
    """Its own loss, the mean over the labels that are not -100."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        logits = self.layer(x)
        return (logits,) if labels is None else (F.cross_entropy(logits, labels), logits)


class Short(Tokenizer):
    model_max_length = 16


class Pair(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


def labelled(length: int) -> list[Any]:
    """Points of three classes, some of them without a label."""
    return points([-100 if index % 5 == 3 else index % 3 for index in range(length)])


def texts(case: str, length: int) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(length)
    samples = []
    for _ in range(length):
        size = int(torch.randint(1, 9, (1,), generator=generator))
        tokens = torch.randint(2, 11, (size,), generator=generator).tolist()
        samples.append(CASES[case].sample(tokens, (torch.rand(size, generator=generator) < 0.8).tolist()))
    return samples


def trained(model: nn.Module, samples: Any, strategy: SingleDevice, **given: Any) -> tuple[list[Any], list[float]]:
    """Gradients and losses of each step, and the losses of three evaluations."""
    with tempfile.TemporaryDirectory() as folder:
        trainer, recorder = make_trainer(
            model, folder, samples, strategy=strategy, **({"num_train_epochs": 2, "logging_steps": 1} | given)
        )
        trainer.train()
        evaluated = trainer.evaluate()["eval_loss"]
    return recorder.gradients, [*recorder.losses, evaluated]


def compare(model: nn.Module, samples: Any, strategy: Static, batch_size: int, exact: Any = None, **given: Any) -> None:
    """A padded run comes to the same as one that is not."""
    expected = trained(
        copy.deepcopy(model), samples, SingleDevice("cpu"), per_device_train_batch_size=batch_size, **given
    )
    per_device = batch_size // strategy.devices
    found = trained(model, samples, strategy, per_device_train_batch_size=per_device, **given)
    torch.testing.assert_close(found, expected, **(exact or EXACT), equal_nan=True)


@pytest.mark.parametrize("kind", STATIC)
@settings(parent=relaxed, max_examples=20)
@given(lengths, batch_sizes, accumulations)
@example(20, 8, 3)
@example(3, 8, 1)
def test_a_classifier_is_trained_as_without(kind: str, length: int, batch_size: int, accumulation: int) -> None:
    strategy = STATIC[kind]()
    size = batch_size * strategy.devices
    compare(Classifier(), labelled(length), strategy, size, gradient_accumulation_steps=accumulation)
    assert strategy.sizes() == [size]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kind", ["static", "operands"])
@settings(parent=relaxed)
@given(lengths, batch_sizes, accumulations)
def test_a_token_model_is_trained_as_without(
    kind: str, case: str, length: int, batch_size: int, accumulation: int
) -> None:
    strategy = STATIC[kind]()
    tolerance = CASES[case].exact
    compare(
        made(case), texts(case, length), strategy, batch_size, {"rtol": tolerance, "atol": tolerance},
        processing_class=Short(), gradient_accumulation_steps=accumulation,
    )  # fmt: skip
    assert len(strategy.shapes.of("training")) == 1


@pytest.mark.parametrize("make", [lambda x, y: (x, y), Pair, lambda x, y: BatchEncoding({"x": x, "labels": y})])
def test_batches_of_every_kind_are_filled_up(make: Callable[[Any, Any], Any]) -> None:
    class Own(Points):
        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return F.cross_entropy(self.layer(x), labels)

    def collate(samples: list[Any]) -> Any:
        return make(*(torch.stack([sample[name] for sample in samples]) for name in ("x", "labels")))

    strategy = Static()
    compare(Own(), labelled(7), strategy, 4, data_collator=collate, gradient_accumulation_steps=2)
    assert strategy.sizes() == [4]


def test_an_iterable_dataset_is_filled_up_too() -> None:
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            return iter(labelled(11))

    strategy = Static()
    compare(Classifier(), Stream(), strategy, 4, max_steps=6)
    assert strategy.sizes() == [4]


def test_what_does_not_fill_a_batch_may_be_left_out() -> None:
    strategy = Static()
    compare(Classifier(), labelled(11), strategy, 4, dataloader_drop_last=True)
    assert strategy.sizes() == [4]
    assert strategy.sizes("evaluation") == [4]  # each sample is evaluated


# Where a batch that is filled up would have another loss


class KnowsNo100(Points):
    """The index -100 is an error."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return -self.layer(x).log_softmax(-1).gather(1, labels[:, None]).mean()


class TakesAll(Points):
    """-100 counts as any other number."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return (self.layer(x)[:, 0] - labels).square().mean()


class OverAllSamples(Points):
    """Samples without a label have a loss of 0, but count."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return F.cross_entropy(self.layer(x), labels, reduction="none").mean()


class Contrastive(Points):
    """Each sample is compared with all others."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        logits = self.layer(x)
        return F.cross_entropy(logits, labels) + 1e-3 * (logits @ logits.T).mean()


class Normalizing(Points):
    """Training takes the statistics of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4, dtype=torch.float64)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return F.cross_entropy(self.layer(self.norm(x)), labels)


class Regression(Points):
    """Labels are no whole numbers."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return (self.layer(x)[:, 0] - labels.double()).square().mean()


INEXACT: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "an error": (KnowsNo100, points([0, 1, 2, 2, 1, 0] * 3)),
    "another loss": (TakesAll, points([0, 1, 2, 2, 1, 0] * 3)),
    "another divisor": (OverAllSamples, points([0, 1, 2, 2, 1, 0] * 3)),
    "other samples": (Contrastive, points([0, 1, 2, 2, 1, 0] * 3)),
    "batch norm": (Normalizing, points([0, 1, 2, 2, 1, 0] * 3)),
    "fractions": (Regression, points([0.5, 1.0, 2.0, 2.5, 1.0, 0.0] * 3, torch.float64)),
}


@pytest.mark.parametrize("why", INEXACT)
@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_batch_that_would_have_another_loss_goes_as_it_is(why: str, accumulation: int) -> None:
    make, samples = INEXACT[why]
    strategy = Static()
    compare(make(), samples, strategy, 5, gradient_accumulation_steps=accumulation)
    assert strategy.sizes() == [5, 3]


def test_compute_loss_gets_batches_as_they_are() -> None:
    def compute_loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return F.cross_entropy(model(batch["x"]), batch["labels"])

    strategy = Static()
    compare(Points(), labelled(18), strategy, 5, compute_loss=compute_loss)
    assert strategy.sizes() == [5, 3]


def test_layers_that_keep_their_statistics_are_no_reason() -> None:
    class Frozen(Normalizing):
        def train(self, mode: bool = True) -> Frozen:
            super().train(mode)
            self.norm.eval()
            return self

    strategy = Static()
    compare(Frozen(), labelled(18), strategy, 5)
    assert strategy.sizes() == [5]


def padding(model: nn.Module) -> Padding:
    strategy = Static()
    strategy.setup()
    return Padding(LossProbe(Loss(model, model, None), strategy), strategy, 4, training=True)


def test_a_batch_that_was_filled_up_during_an_evaluation_is_cut_again() -> None:
    model = Normalizing().eval()
    batch = {"x": torch.ones(3, 4, dtype=torch.float64), "labels": torch.tensor([0, 1, 2])}
    ahead = padding(model)
    assert ahead.wants(batch, 3)
    model.train()
    assert not ahead.wants(batch, 3)
    assert len(ahead.settled(pad_rows(batch, 4), batch)["x"]) == 3
    model.eval()
    assert len(ahead.settled(pad_rows(batch, 4), batch)["x"]) == 4


def test_what_was_found_not_to_be_exact_is_filled_up_no_more() -> None:
    batch = {"x": torch.randn(3, 4, dtype=torch.float64), "labels": torch.tensor([0, 1, 2])}
    of_sums = padding(TakesAll())
    assert of_sums.wants(batch, 3)
    assert len(of_sums.settled(pad_rows(batch, 4), batch)["x"]) == 3
    assert not of_sums.wants(batch, 3)
    assert of_sums.wants(batch, 3, with_loss=False)


def test_the_model_is_looked_at_once() -> None:
    looks = []

    class Watched(Classifier):
        def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
            if not self.training:
                looks.append(labels)
            return super().forward(x, labels)

    with tempfile.TemporaryDirectory() as folder:
        make_trainer(
            Watched(), folder, labelled(10), strategy=Static(), per_device_train_batch_size=4, num_train_epochs=3
        )[0].train()
    assert len(looks) == 3


def test_other_strategies_are_given_what_there_is() -> None:
    strategy = SingleDevice("cpu")
    trained(Classifier(), labelled(7), strategy, per_device_train_batch_size=4)
    assert [shape.columns["x"][0][0] for shape in strategy.shapes.of("training")] == [4, 3]


def test_devices_share_a_batch() -> None:
    strategy = OnFour()
    gradients, _ = trained(Classifier(), labelled(16), strategy, per_device_train_batch_size=2)
    assert len(gradients) == 2 * 2
    assert strategy.sizes() == [8]
    assert strategy.sizes("evaluation") == [8]


# Rows


def test_rows_are_copies_of_the_last_without_labels() -> None:
    batch = {
        "x": torch.arange(6).view(2, 3),
        "scale": torch.tensor(2.0),
        "shared": torch.ones(5),
        "labels": torch.tensor([1, 2]),
    }
    padded = pad_rows(batch, 4)
    assert padded["x"].tolist() == [[0, 1, 2], [3, 4, 5], [3, 4, 5], [3, 4, 5]]
    assert padded["labels"].tolist() == [1, 2, -100, -100]
    assert padded["scale"] is batch["scale"]
    assert padded["shared"] is batch["shared"]
    assert batch["labels"].tolist() == [1, 2]
    assert pad_rows((torch.ones(1, 2), torch.tensor([0.5])), 3)[1].tolist() == [0.5] * 3


def test_outputs_are_cut_to_the_samples_own_rows() -> None:
    outputs = (torch.arange(4), torch.arange(8), torch.tensor(1.0), torch.ones(3, 4))
    found = trim_rows(outputs, 4, 3)
    assert [each.tolist() for each in found[:3]] == [[0, 1, 2], [0, 1, 2, 3, 4, 5], 1.0]
    assert found[3].shape == (3, 4)


def test_a_collator_that_packs_is_left_alone() -> None:
    model = Normalizing().eval()

    def micro(samples: int, rows: int) -> MicroBatch:
        batch = {"x": torch.ones(rows, 4, dtype=torch.float64), "labels": torch.zeros(rows, dtype=torch.int64)}
        return MicroBatch(
            batch, count(batch, samples), GlobalBatch(0, 0, 0, False), 0, True, 0, list(range(samples)), samples
        )

    packed, short, ragged, full = micro(4, 1), micro(3, 2), micro(3, 3), micro(4, 4)
    filled = [len(each.batch["x"]) for each in padding(model).filled(iter([packed, short, ragged, full]))]
    assert filled == [1, 2, 4, 4]


def test_without_a_loss_only_batches_are_filled_whose_tensors_all_have_their_samples() -> None:
    of_rows = {"x": torch.ones(3, 4), "scale": torch.ones(3)}
    assert padding(Normalizing()).wants(of_rows, 3, with_loss=False)
    assert not padding(Normalizing()).wants(of_rows | {"pixels": torch.ones(6, 2)}, 3, with_loss=False)
