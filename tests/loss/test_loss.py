"""The loss contract: gradients and losses are those of all samples in one batch, however they are cut up."""

from __future__ import annotations

import tempfile
from collections import namedtuple
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from kit.loss_cases import (
    CASES,
    EXACT,
    VOCABULARY,
    Points,
    Tokenizer,
    Tokens,
    bert_config,
    gradient,
    made,
    make_trainer,
    points,
    reference,
    summed,
)
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from transformers import BatchEncoding, BertForSequenceClassification

from trainer_kit import ReadyBatches
from trainer_kit.data.collate import PadCollator
from trainer_kit.data.sampling import permutation
from trainer_kit.loss.loss import Loss, found_loss, scale_gradients, weighed

relaxed = settings(max_examples=8, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])

rows = st.lists(st.tuples(st.integers(2, VOCABULARY - 1), st.booleans()), min_size=1, max_size=9)
datasets = st.lists(rows, min_size=1, max_size=14)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
@settings(parent=relaxed, max_examples=12)
@given(datasets, st.integers(1, 6), st.integers(1, 4))
@example([[(5, True), (6, True)], [(7, False)], [(8, True)], [(9, False)]], 1, 3)
def test_gradients_and_losses_are_those_of_one_batch(
    case: str, drawn: list[list[tuple[int, bool]]], batch_size: int, accumulation: int
) -> None:
    _, make_sample, total, exact = CASES[case]
    model, collate = made(case), PadCollator(Tokenizer())
    samples = [make_sample([token for token, _ in row], [keep for _, keep in row]) for row in drawn]
    with tempfile.TemporaryDirectory() as folder:
        trainer, recorder = make_trainer(
            model, folder, samples, processing_class=Tokenizer(), per_device_train_batch_size=batch_size,
            per_device_eval_batch_size=batch_size, gradient_accumulation_steps=accumulation, logging_steps=1,
        )  # fmt: skip
        trainer.train()
        evaluated = trainer.evaluate()["eval_loss"]
    order, window = permutation(len(samples), 42, 0).tolist(), batch_size * accumulation
    steps = [order[start : start + window] for start in range(0, len(order), window)]
    assert len(recorder.gradients) == len(steps)
    for indices, found, loss in zip(steps, recorder.gradients, recorder.losses, strict=True):
        batch = collate([samples[index] for index in indices])
        expected = reference(model, lambda batch=batch: total(model, batch))
        torch.testing.assert_close(found, expected.gradient, rtol=exact, atol=exact)
        assert loss == pytest.approx(expected.loss if expected.items else 0.0, rel=exact)
    whole = reference(model, lambda: total(model, collate(samples)))
    assert evaluated == pytest.approx(whole.loss, rel=exact, nan_ok=True)
    assert (evaluated != evaluated) == (whole.items == 0)


@pytest.mark.parametrize("case", ["gpt2", "plain", "plain-shifted"])
def test_eval_loss_does_not_depend_on_the_batch_size(case: str, tmp_path: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(2, 12, (32,), generator=generator).tolist()
    samples = [
        {"input_ids": (ids := torch.randint(2, VOCABULARY, (length,), generator=generator)), "labels": ids}
        for length in lengths
    ]
    found = []
    for batch_size in range(1, 17):
        trainer, _ = make_trainer(
            made(case), str(tmp_path), samples, processing_class=Tokenizer(), per_device_eval_batch_size=batch_size
        )
        found.append(trainer.evaluate()["eval_loss"])
    whole = reference(made(case), lambda: CASES[case].total(made(case), PadCollator(Tokenizer())(samples)))
    assert found == pytest.approx([whole.loss] * 16, rel=CASES[case].exact)


# What compute_loss may return


def mean(model: nn.Module, batch: Any) -> Any:
    return F.cross_entropy(model(batch["x"]), batch["labels"])


def pair(kind: Callable[[torch.Tensor], Any]) -> Callable[[nn.Module, Any], Any]:
    def compute_loss(model: nn.Module, batch: Any) -> Any:
        loss = F.cross_entropy(model(batch["x"]), batch["labels"], reduction="sum")
        return loss, kind((batch["labels"] != -100).sum())

    return compute_loss


MEANS_AND_PAIRS = {
    "mean": mean,
    "int": pair(int),
    "float": pair(float),
    "tensor": pair(lambda count: count),
    "float tensor": pair(lambda count: count.double()),
}


@pytest.mark.parametrize("kind", MEANS_AND_PAIRS)
@relaxed
@given(st.lists(st.sampled_from([0, 1, 2, -100]), min_size=1, max_size=16), st.integers(1, 5), st.integers(1, 4))
@example([-100, -100], 1, 1)
@example([-100, 0, -100, 1, 2], 1, 4)
def test_a_mean_and_a_sum_with_its_count_give_the_same(
    kind: str, labels: list[int], batch_size: int, accumulation: int
) -> None:
    model, samples = Points(), points(labels)
    with tempfile.TemporaryDirectory() as folder:
        trainer, recorder = make_trainer(
            model, folder, samples, compute_loss=MEANS_AND_PAIRS[kind], per_device_train_batch_size=batch_size,
            gradient_accumulation_steps=accumulation, per_device_eval_batch_size=batch_size,
        )  # fmt: skip
        trainer.train()
        evaluated = trainer.evaluate()["eval_loss"]
    order, window = permutation(len(samples), 42, 0).tolist(), batch_size * accumulation
    for place, found in enumerate(recorder.gradients):
        indices = order[place * window : (place + 1) * window]
        x = torch.stack([samples[index]["x"] for index in indices])
        wanted = torch.stack([samples[index]["labels"] for index in indices])
        expected = reference(model, lambda x=x, wanted=wanted: summed(model(x), wanted))
        torch.testing.assert_close(found, expected.gradient, **EXACT)
        assert recorder.losses[place] == pytest.approx(expected.loss if expected.items else 0.0, rel=1e-9)
    x, wanted = (torch.stack([sample[name] for sample in samples]) for name in ("x", "labels"))
    whole = reference(model, lambda: summed(model(x), wanted))
    assert evaluated == pytest.approx(whole.loss, rel=1e-12, nan_ok=True)


def test_a_count_may_be_a_fraction(tmp_path: Any) -> None:
    """Weights of samples, whose sums are no whole numbers and may be less than 1."""
    samples = [sample | {"weight": 0.03 + index / 70} for index, sample in enumerate(points([0, 1, 2, 0, 1]))]

    def weighted(model: nn.Module, batch: Any) -> Any:
        losses = F.cross_entropy(model(batch["x"]), batch["labels"], reduction="none")
        return (losses * batch["weight"]).sum(), float(batch["weight"].sum())

    model = Points()
    trainer, recorder = make_trainer(
        model, str(tmp_path), samples, compute_loss=weighted, per_device_train_batch_size=2,
        gradient_accumulation_steps=3,
    )  # fmt: skip
    trainer.train()
    x, labels = (torch.stack([sample[name] for sample in samples]) for name in ("x", "labels"))
    weights = torch.tensor([sample["weight"] for sample in samples])
    losses = F.cross_entropy(model(x), labels, reduction="none")
    expected = (losses * weights).sum() / weights.sum()
    expected.backward()
    torch.testing.assert_close(recorder.gradients[0], gradient(model), rtol=1e-6, atol=1e-8)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected.item(), rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_regression_counts_samples(tmp_path: Any, dtype: torch.dtype) -> None:
    class Regression(Points):
        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:  # type: ignore[override]
            return {"loss": F.mse_loss(self.layer(x)[:, 0], labels.double())}

    model, samples = Regression(1), points([0.5, -100.0, 3.0, 4.0, 2.5], dtype)  # -100 is a number like any other here
    trainer, recorder = make_trainer(
        model, str(tmp_path), samples, per_device_train_batch_size=2, gradient_accumulation_steps=3
    )
    trainer.train()
    x, labels = (torch.stack([sample[name] for sample in samples]) for name in ("x", "labels"))
    expected = reference(model, lambda: ((model.layer(x)[:, 0] - labels).square().sum(), 5))
    torch.testing.assert_close(recorder.gradients[0], expected.gradient, **EXACT)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected.loss, rel=1e-12)


@pytest.mark.parametrize("kind", ["tuple", "named tuple", "tensor", "other names"])
def test_batches_of_every_kind_are_weighed_by_what_they_hold(tmp_path: Any, kind: str) -> None:
    class Pair(NamedTuple):
        x: torch.Tensor
        y: torch.Tensor

    class Own(Points):
        def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:  # type: ignore[override]
            logits = self.layer(x)
            return logits.square().mean() if y is None else F.cross_entropy(logits, y)

    labels = [0, 1, -100, 2, -100] if kind in ("tuple", "named tuple") else [0, 1, 2, 2, 0]
    dicts = points(labels)
    samples: list[Any] = {
        "tuple": [(each["x"], each["labels"]) for each in dicts],
        "named tuple": [Pair(each["x"], each["labels"]) for each in dicts],
        "tensor": [each["x"] for each in dicts],
        "other names": [{"x": each["x"], "y": each["labels"]} for each in dicts],
    }[kind]
    model = Own()
    trainer, recorder = make_trainer(
        model, str(tmp_path), samples, per_device_train_batch_size=2, gradient_accumulation_steps=3
    )
    trainer.train()
    x, wanted = (torch.stack([each[name] for each in dicts]) for name in ("x", "labels"))
    if kind == "tensor":
        expected = reference(model, lambda: (model.layer(x).square().mean() * 5, 5))
    else:
        expected = reference(model, lambda: summed(model.layer(x), wanted))
    torch.testing.assert_close(recorder.gradients[0], expected.gradient, **EXACT)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected.loss, rel=1e-12)


@pytest.mark.parametrize("kind", ["named tuple", "mapping"])
def test_compute_loss_always_gets_batches_of_their_own_kind(tmp_path: Any, kind: str) -> None:
    class Pair(NamedTuple):
        input_ids: Any
        labels: Any

    def collate(samples: list[Any]) -> Any:
        batch = torch.stack(samples)
        if kind == "mapping":
            return BatchEncoding({"input_ids": batch, "labels": batch.where(batch > 5, -100)})
        return Pair(batch, batch.where(batch > 5, -100))

    def compute_loss(model: Any, batch: Any) -> torch.Tensor:
        logits = model.logits(batch.input_ids)
        return F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten())

    samples = [torch.tensor([2, 3, 4]), torch.tensor([7, 8, 9]), torch.tensor([4, 3, 2]), torch.tensor([9, 2, 9])]
    model = Tokens().double()
    trainer, recorder = make_trainer(
        model, str(tmp_path), samples, compute_loss=compute_loss, data_collator=collate, per_device_train_batch_size=1,
        gradient_accumulation_steps=4,
    )  # fmt: skip
    trainer.train()
    batch = torch.stack(samples)
    expected = reference(model, lambda: summed(model.logits(batch), batch.where(batch > 5, -100)))
    torch.testing.assert_close(recorder.gradients[0], expected.gradient, **EXACT)


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.RNN(2, 2)

    def forward(self, x: PackedSequence) -> dict[str, torch.Tensor]:
        return {"loss": F.mse_loss(self.rnn(x)[0].data, x.data)}


def test_a_packed_sequence_is_one_argument(tmp_path: Any) -> None:
    torch.manual_seed(0)
    samples = [torch.randn(length, 2) for length in (3, 4, 2, 3)]
    model, batches = Packed(), [pack_sequence(samples[:2], False), pack_sequence(samples[2:], False)]
    given = {"per_device_train_batch_size": 2, "per_device_eval_batch_size": 2, "shuffle": False}
    trainer, recorder = make_trainer(
        model, str(tmp_path), samples, data_collator=lambda each: pack_sequence(each, False), **given
    )
    trainer.train()
    expected = [model(batch)["loss"].item() for batch in batches]
    assert recorder.losses == expected
    assert trainer.evaluate()["eval_loss"] == pytest.approx(sum(expected) / 2)

    ready, recorder = make_trainer(model, str(tmp_path), ReadyBatches(batches), shuffle=False)
    ready.train()
    assert recorder.losses == expected


def squeezed(model: nn.Module, batch: Any) -> Any:
    """The outputs for a batch of one sample have no dimension."""
    scores = model.layer(batch["x"])[:, 0].squeeze()  # type: ignore[operator, union-attr, index]
    return F.mse_loss(scores, batch["labels"].to(scores.dtype).view_as(scores)), scores


@pytest.mark.parametrize("batch_size", [1, 2, 4])
def test_outputs_without_a_dimension_are_no_count(tmp_path: Any, batch_size: int) -> None:
    """Five samples leave a batch of one."""

    def flat(model: nn.Module, batch: Any) -> Any:
        loss, scores = squeezed(model, batch)
        return loss, scores.reshape(-1)

    found = []
    for compute_loss in (flat, squeezed):
        options: dict[str, Any] = {"per_device_train_batch_size": batch_size, "per_device_eval_batch_size": batch_size}
        trainer, recorder = make_trainer(
            Points(), str(tmp_path), points([0, 1, 1, 0, 1]), compute_loss=compute_loss,
            compute_metrics=lambda given: {"mean": given.predictions.mean(), "rows": len(given.predictions)}, **options,
        )  # fmt: skip
        trainer.train()
        found.append((recorder.losses, trainer.evaluate()["eval_loss"], trainer.evaluate()["eval_mean"]))
        assert trainer.evaluate()["eval_rows"] == 5
    assert found[0] == found[1]


def test_two_scalars_for_one_sample_may_mean_two_things(tmp_path: Any) -> None:
    options: dict[str, Any] = {"per_device_eval_batch_size": 1}
    trainer, _ = make_trainer(Points(), str(tmp_path), points([0, 1]), compute_loss=squeezed, **options)
    with pytest.raises(ValueError, match="two scalars for a batch of one sample"):
        trainer.evaluate()
    trainer.train()
    assert trainer.evaluate()["eval_loss"] > 0


@pytest.mark.parametrize(("batch_size", "learned"), [(1, False), (2, False), (2, True)])  # (1, True) may be an output
def test_a_count_may_be_a_sum_of_weights(tmp_path: Any, batch_size: int, learned: bool) -> None:
    weights = nn.Parameter(torch.tensor([0.3, 0.45], dtype=torch.float64), requires_grad=learned)

    def weighted(model: nn.Module, batch: Any) -> Any:
        each = weights[batch["labels"]]
        losses = F.cross_entropy(model.layer(batch["x"]), batch["labels"], reduction="none")  # type: ignore[operator]
        return (losses * each).sum(), each.sum()

    trainer, recorder = make_trainer(
        Points(), str(tmp_path), points([0, 1]), compute_loss=weighted, gradient_accumulation_steps=2 // batch_size,
        per_device_train_batch_size=batch_size, shuffle=False,
    )  # fmt: skip
    trainer.train()
    logits = torch.stack([trainer.model.layer(each["x"]) for each in points([0, 1])])  # type: ignore[operator]
    losses = F.cross_entropy(logits, torch.tensor([0, 1]), reduction="none")
    expected = (losses * weights).sum() / weights.sum()
    assert recorder.losses == pytest.approx([expected.item()])


# What is said of a mistake


def test_where_a_loss_is_found() -> None:
    loss, scores = torch.tensor(1.0), torch.ones(3)

    class Output:
        def __init__(self) -> None:
            self.loss = loss

    class Named(NamedTuple):
        perplexity: torch.Tensor
        loss: torch.Tensor

    named = Named(loss.exp(), loss)
    for output in (loss, {"loss": loss}, {"logits": scores, "loss": loss}, (loss, scores), [loss], Output(), named):
        assert found_loss(output) is loss
    for output in (scores, {"logits": scores}, {"loss": scores}, (scores, loss), Named(loss, scores), (), None, 1.0):
        assert found_loss(output) is None


@pytest.mark.parametrize("kind", ["dict", "attribute", "field", "tuple"])
def test_a_named_loss_may_be_of_shape_one(kind: str) -> None:
    loss, fields = torch.tensor([2.0]), namedtuple("fields", "loss logits")
    outputs = {
        "dict": {"loss": loss}, "attribute": SimpleNamespace(loss=loss), "field": fields(loss, torch.zeros(1)),
        "tuple": (loss, torch.zeros(1)),
    }  # fmt: skip
    found = found_loss(outputs[kind])
    if kind == "tuple":  # the predictions of one sample may look like this
        assert found is None
    else:
        assert found is not None
        assert (found.shape, found.item()) == ((), 2.0)


def failing(tmp_path: Any, model: nn.Module, samples: Any, **given: Any) -> Any:
    trainer, _ = make_trainer(model, str(tmp_path), samples, **given)
    with pytest.raises(ValueError) as caught:  # noqa: PT011  (the callers match)
        trainer.train()
    return str(caught.value)


def test_a_model_without_a_loss_is_told_of_by_what_it_returned(tmp_path: Any) -> None:
    class Logits(Points):
        def forward(self, x: torch.Tensor, labels: Any = None) -> Any:  # type: ignore[override]
            return {"logits": self.layer(x)}

    class PerSample(Points):
        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Any:  # type: ignore[override]
            return {"loss": F.cross_entropy(self.layer(x), labels, reduction="none")}

    message = failing(tmp_path, Logits(), points([0, 1]))
    assert "Logits returned no loss but a dict with logits" in message
    assert "the batch has x, labels" in message
    assert "compute_loss=" in message
    message = failing(tmp_path, PerSample(), points([0, 1]))
    assert "a loss that is a tensor of shape [2]" in message
    message = failing(tmp_path, BertForSequenceClassification(bert_config()), [{"input_ids": [2, 3]}] * 2)
    assert "the batch has input_ids" in message
    assert "'labels'" in message


def test_a_column_that_the_model_does_not_take_is_named(tmp_path: Any) -> None:
    class Own(Points):
        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return F.cross_entropy(self.layer(x), labels)

    samples = [sample | {"id": 3, "extra": 1.0} for sample in points([0, 1])]
    message = failing(tmp_path, Own(), samples, remove_unused_columns=False)
    assert "columns id and extra, which Own.forward does not take (it takes x, labels)" in message


@pytest.mark.parametrize(
    "result",
    [None, 3.0, torch.ones(2), (torch.tensor(1.0), {"logits": 1}), (torch.tensor(1.0), 2, 3, torch.ones(2)),
     (torch.ones(2), 2), (1.0, 2), (torch.tensor(1.0), 2, 3), (torch.tensor(1.0), None)],
)  # fmt: skip
def test_what_compute_loss_must_return_is_said(tmp_path: Any, result: Any) -> None:
    message = failing(tmp_path, Points(), points([0, 1]), compute_loss=lambda model, batch: result)
    assert "compute_loss returned" in message
    assert "(loss_sum, count)" in message


@pytest.mark.parametrize("label", [7, -1])
@pytest.mark.parametrize("kind", ["module", "transformers", "compute_loss", "tokens"])
def test_labels_outside_the_classes_are_named_with_the_classes(tmp_path: Any, kind: str, label: int) -> None:
    class Own(Points):
        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return nn.CrossEntropyLoss()(self.layer(x), labels)

    if kind == "module":
        message = failing(tmp_path, Own(), points([0, label]))
    elif kind == "compute_loss":
        message = failing(tmp_path, Points(), points([0, label]), compute_loss=mean)
    elif kind == "tokens":
        samples = [{"input_ids": [2, 3], "attention_mask": [1, 1], "labels": [2, label * 3]}] * 2
        message = failing(tmp_path, Tokens(), samples)
    else:
        samples = [{"input_ids": [2, 3], "labels": label}] * 2
        message = failing(tmp_path, BertForSequenceClassification(bert_config()), samples)
    classes = VOCABULARY if kind == "tokens" else 3
    assert (
        f"the labels hold {label * 3 if kind == 'tokens' else label}, outside the model's {classes} classes" in message
    )


def test_another_index_error_is_left_alone(tmp_path: Any) -> None:
    trainer, _ = make_trainer(Points(), str(tmp_path), points([0, 1]), compute_loss=lambda model, batch: [][1])
    with pytest.raises(IndexError, match="list index out of range"):
        trainer.train()


# Counts that are operands of the device


@settings(parent=relaxed, max_examples=50)
@given(st.integers(0, 9), st.integers(0, 9), st.floats(-5, 5))
def test_counts_as_operands_weigh_as_numbers_do(items: int, others: int, value: float) -> None:
    total, mean_loss = items + others, torch.tensor(value, dtype=torch.float64)
    expected = weighed(mean_loss, items, total)
    torch.testing.assert_close(weighed(mean_loss, torch.tensor(items), torch.tensor(total)), expected, **EXACT)
    divided, grads = mean_loss / 7, []
    for divisor, of in ((7, total), (torch.tensor(7), torch.tensor(total)), (7, torch.tensor(total))):
        parameter = nn.Parameter(torch.ones(2, dtype=torch.float64))
        parameter.grad = torch.full((2,), value, dtype=torch.float64) / 7
        loss = scale_gradients([parameter.grad], divided, divisor, of)
        grads.append(torch.stack([*parameter.grad, loss]))
    torch.testing.assert_close(grads[1:], [grads[0]] * 2, **EXACT)


def test_a_batch_without_labels_takes_the_way_of_all_where_counts_are_operands() -> None:
    model, labels = Points(), torch.tensor([-100, 1, -100])
    loss, batch = Loss(model, model, None), {"x": torch.ones(3, 4, dtype=torch.float64), "labels": labels}
    assert loss.with_valid_labels(batch, torch.tensor(1), nullcontext)["labels"].tolist() == [-100, 1, -100]
    assert loss.with_valid_labels(batch, torch.tensor(0), nullcontext)["labels"].tolist() == [0, 1, 0]
    assert labels.tolist() == [-100, 1, -100]
