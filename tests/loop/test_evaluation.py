from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kit.static_shapes import STATIC, Static, WithOperands
from kit.trainer import UNUSED
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.data import IterableDataset
from torchmetrics import MeanMetric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

from trainer_kit import Callback, EvalPrediction, Run, SingleDevice, Trainer, TrainingArguments
from trainer_kit.errors import EvaluationInterrupted
from trainer_kit.loop.evaluation import PredictionOutput
from trainer_kit.strategies.device_info import DeviceInfo

CLASSES = 4


class Classifier(nn.Module):
    """Dropout, and a layer that its user keeps in evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(5, CLASSES)
        self.dropout = nn.Dropout(0.5)
        self.frozen = nn.BatchNorm1d(5).eval()

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        logits = self.layer(self.dropout(self.frozen(x)))
        return {"logits": logits} if labels is None else {"loss": F.cross_entropy(logits, labels), "logits": logits}


def samples(length: int = 37, labels: bool = True) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    made = [
        {"x": torch.randn(5, generator=generator), "labels": torch.tensor(index * 7 % CLASSES)}
        for index in range(length)
    ]
    return made if labels else [{"x": each["x"]} for each in made]


def make_trainer(tmp_path: Any, model: nn.Module | None = None, **given: Any) -> Trainer:
    names = set(TrainingArguments().to_dict()) - {"strategy"}
    values: dict[str, Any] = {
        "output_dir": str(tmp_path), "use_cpu": True, "report_to": "none", "disable_tqdm": True, "log_level": "error",
        "save_strategy": "no", "per_device_eval_batch_size": 8,
    }  # fmt: skip
    values |= {name: given.pop(name) for name in names & set(given)}
    return Trainer(model or Classifier(), TrainingArguments(**values), **given)


def whole(model: nn.Module, dataset: list[dict[str, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    x, labels = (torch.stack([each[name] for each in dataset]) for name in ("x", "labels"))
    with torch.no_grad():
        return model.eval()(x)["logits"], labels


def accuracy(prediction: EvalPrediction) -> dict[str, Any]:
    return {"accuracy": (prediction.predictions.argmax(-1) == prediction.label_ids).mean()}


@pytest.mark.parametrize("batch_size", [1, 8, 100])
def test_streaming_metrics_equal_compute_metrics_and_the_truth(tmp_path: Any, batch_size: int) -> None:
    trainer = make_trainer(
        tmp_path, per_device_eval_batch_size=batch_size, compute_metrics=accuracy,
        metrics={"streamed": MulticlassAccuracy(CLASSES, average="micro")},
    )  # fmt: skip
    found = trainer.evaluate(samples())
    logits, labels = whole(trainer.run.model, samples())
    assert found["eval_accuracy"] == (logits.argmax(-1) == labels).double().mean().item()
    assert found["eval_streamed"] == pytest.approx(found["eval_accuracy"])
    assert found["eval_loss"] == pytest.approx(F.cross_entropy(logits, labels).item(), rel=1e-6)
    assert trainer.evaluate(samples(3))["eval_streamed"] == pytest.approx(
        (logits[:3].argmax(-1) == labels[:3]).double().mean().item()
    )  # begun anew


@pytest.mark.parametrize("names", [None, ["labels"]])
def test_a_loss_that_pops_the_labels_leaves_them_to_the_metrics(tmp_path: Any, names: list[str] | None) -> None:
    def popping(model: nn.Module, batch: dict[str, torch.Tensor]) -> Any:
        labels = batch.pop("labels")
        output = model(**batch)
        return F.cross_entropy(output["logits"], labels), output

    options: dict[str, Any] = {"compute_metrics": accuracy, "label_names": names, "max_steps": 2}
    options["metrics"] = {"streamed": MulticlassAccuracy(CLASSES, average="micro")}
    trainer = make_trainer(tmp_path, compute_loss=popping, train_dataset=samples(), **options)
    trainer.train()
    logits, labels = whole(trainer.run.model, samples())
    found = trainer.predict(samples())
    assert found.metrics["test_accuracy"] == (logits.argmax(-1) == labels).double().mean().item()
    assert found.metrics["test_streamed"] == pytest.approx(found.metrics["test_accuracy"])
    np.testing.assert_array_equal(found.label_ids, labels.numpy())


def test_a_loss_may_make_the_labels_of_the_metrics(tmp_path: Any) -> None:
    def making(model: nn.Module, batch: dict[str, torch.Tensor]) -> Any:
        batch["labels"] = (batch["x"][:, 0] > 0).long()
        output = model(**batch)
        return output["loss"], output

    def compare(given: EvalPrediction) -> dict[str, Any]:
        return {"same": (given.label_ids == labels.numpy()).all()}

    labels = (torch.stack([each["x"] for each in samples()])[:, 0] > 0).long()
    trainer = make_trainer(tmp_path, compute_loss=making, compute_metrics=compare)
    assert trainer.evaluate(samples(labels=False))["eval_same"]


@settings(max_examples=20)
@given(st.integers(1, 40), st.integers(1, 9), st.integers(0, 3))
def test_predictions_come_once_each_in_order(length: int, batch_size: int, seed: int) -> None:
    torch.manual_seed(seed)
    trainer = make_trainer(UNUSED, per_device_eval_batch_size=batch_size, compute_metrics=accuracy)
    dataset = samples(length)
    output = trainer.predict(dataset)
    logits, labels = whole(trainer.run.model, dataset)
    np.testing.assert_allclose(output.predictions, logits.numpy(), rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(output.label_ids, labels.numpy())
    assert set(output.metrics) == {
        "test_loss", "test_accuracy", "test_runtime", "test_samples_per_second", "test_steps_per_second",
    }  # fmt: skip


def test_the_model_is_left_as_it_was(tmp_path: Any) -> None:
    model = Classifier()
    model.dropout.p = 0.0
    trainer = make_trainer(tmp_path, model)
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    trainer.evaluate(samples())
    assert [module.training for module in model.modules()] == [True, True, True, False]
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in model.named_buffers())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not model._forward_hooks

    class Broken(list[Any]):
        def __getitem__(self, index: Any) -> Any:
            raise OSError("gone")

    with pytest.raises(RuntimeError, match="index 0: OSError: gone"):
        trainer.evaluate(Broken(samples()))
    assert [module.training for module in model.modules()] == [True, True, True, False]
    assert not model._forward_hooks


@pytest.mark.slow
def test_memory_does_not_grow_with_the_dataset(tmp_path: Any) -> None:
    class Watching(MeanMetric):
        """Notes at some batches how much there is."""

        batches = 0

        def update(self, predictions: torch.Tensor, labels: torch.Tensor) -> None:
            super().update((predictions.argmax(-1) == labels).double())
            self.__class__.batches += 1
            if self.batches in (200, 900):
                gc.collect()
                alive = [each for each in gc.get_objects() if type(each) is torch.Tensor]
                noted.append((len(alive), sum(each.numel() for each in alive), tracemalloc.get_traced_memory()[0]))

    class Endless:
        """Samples made when they are asked for."""

        def __len__(self) -> int:
            return 1900

        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
            return {"x": torch.full((5,), float(index)), "labels": torch.tensor(index % CLASSES)}

    noted: list[tuple[int, int, int]] = []
    trainer = make_trainer(tmp_path, per_device_eval_batch_size=2, metrics=[Watching()])
    tracemalloc.start()
    try:
        trainer.evaluate(Endless())
    finally:
        tracemalloc.stop()
    (early, early_elements, early_bytes), (late, late_elements, late_bytes) = noted
    ahead = 512  # samples of small batches that are read at once, in batches of two tensors
    assert late <= early + 64 + ahead  # losses that wait to be read
    assert late_elements <= early_elements + 64 + 6 * ahead
    assert late_bytes <= early_bytes + 100_000  # keeping the predictions of 700 batches takes several times that


@pytest.mark.parametrize("workers", [0, 2])
def test_an_evaluation_always_gives_the_same(tmp_path: Any, workers: int) -> None:
    class Sampling(Classifier):
        """Draws in evaluation too, as a variational autoencoder does."""

        def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
            return super().forward(x + torch.randn_like(x), labels)

    found = []
    for seed in range(2):
        trainer = make_trainer(tmp_path, Sampling(), dataloader_num_workers=workers)
        for _ in range(2):
            torch.manual_seed(seed)
            found.append(trainer.evaluate(samples())["eval_loss"])
    reference = make_trainer(tmp_path, Sampling()).evaluate(samples())["eval_loss"]
    assert found == [reference] * 4


def test_evaluating_while_training_does_not_change_the_training(tmp_path: Any) -> None:
    def trained(**changes: Any) -> list[torch.Tensor]:
        trainer = make_trainer(
            tmp_path, train_dataset=samples(), eval_dataset=samples(9), max_steps=6, learning_rate=0.1, **changes
        )
        trainer.train()
        return [parameter.detach() for parameter in trainer.run.model.parameters()]

    expected = trained()
    for changes in (
        {"eval_strategy": "steps", "eval_steps": 1},
        {"eval_strategy": "steps", "eval_steps": 2, "dataloader_num_workers": 2},
    ):
        found = trained(**changes)
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_what_a_model_predicts(tmp_path: Any) -> None:
    class Returning(Classifier):
        result: Any

        def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
            return self.result(super().forward(x, labels))

    model = Returning()
    logits = whole(Classifier(), samples())[0].numpy()
    shapes: list[tuple[Any, Any]] = [
        (lambda out: (out["loss"], out["logits"]), logits),
        (lambda out: out["logits"], logits),
        (lambda out: {"loss": out["loss"], "kl": out["loss"] * 2, "scores": out["logits"]}, logits),
        (lambda out: (out["loss"], out["loss"] * 2, out["logits"]), logits),
        (lambda out: {"loss": out["loss"], "a": out["logits"], "b": out["logits"] * 2}, (logits, logits * 2)),
        (lambda out: {"logits": (out["logits"], out["logits"] * 2)}, (logits, logits * 2)),
        (lambda out: {"logits": out["logits"].bfloat16()}, None),
    ]
    for result, expected in shapes:
        model.result = result
        found = make_trainer(tmp_path, model).predict(samples()).predictions
        if expected is None:
            assert found.dtype == np.float32
        elif isinstance(expected, tuple):
            assert isinstance(found, tuple)
            for one, other in zip(found, expected, strict=True):
                np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
        else:
            np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    model.result = lambda out: out["loss"]
    with pytest.raises(ValueError, match="holds no predictions for the metrics"):
        make_trainer(tmp_path, model).predict(samples())


def test_batches_of_different_widths_are_filled_up(tmp_path: Any) -> None:
    class Tokens(nn.Module):
        def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            scores = input_ids[..., None].float() * torch.ones(3)
            return {"loss": scores.mean(), "logits": scores}

    rows = [{"input_ids": torch.full((width,), width), "labels": torch.full((width,), width)} for width in (2, 4, 3)]
    output = make_trainer(tmp_path, Tokens(), per_device_eval_batch_size=1).predict(rows)
    assert output.predictions.shape == (3, 4, 3)
    assert output.label_ids.tolist() == [[2, 2, -100, -100], [4, 4, 4, 4], [3, 3, 3, -100]]
    assert output.predictions[0, :, 0].tolist() == [2, 2, -100, -100]


def test_predict_without_labels(tmp_path: Any) -> None:
    trainer = make_trainer(
        tmp_path, compute_metrics=accuracy, metrics=MulticlassAccuracy(CLASSES),
        compute_loss=lambda model, batch: F.cross_entropy(model(batch["x"])["logits"], batch["labels"]),
    )  # fmt: skip
    output = trainer.predict(samples(labels=False))
    assert output.label_ids is None
    assert output.predictions.shape == (37, CLASSES)
    assert set(output.metrics) == {"test_runtime", "test_samples_per_second", "test_steps_per_second"}
    with_labels = trainer.predict(samples())
    assert {"test_loss", "test_accuracy", "test_multiclassaccuracy"} <= set(with_labels.metrics)
    np.testing.assert_array_equal(with_labels.predictions, output.predictions)


def test_columns_of_compute_loss_need_not_be_the_models(tmp_path: Any) -> None:
    def compute_loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return F.cross_entropy(model(batch["x"])["logits"], batch["target"])

    dataset = [{"x": each["x"], "target": each["labels"]} for each in samples()]
    trainer = make_trainer(tmp_path, compute_loss=compute_loss)
    logits, labels = whole(trainer.run.model, samples())
    assert trainer.evaluate(dataset)["eval_loss"] == pytest.approx(F.cross_entropy(logits, labels).item(), rel=1e-6)
    np.testing.assert_allclose(trainer.predict(dataset).predictions, logits.numpy(), rtol=1e-5, atol=1e-6)
    trainer = make_trainer(tmp_path, compute_loss=compute_loss, metrics=MulticlassAccuracy(CLASSES))
    with pytest.raises(ValueError, match="metrics need labels, but the batch is a dict with the entries x, target"):
        trainer.evaluate(dataset)


def test_a_loss_without_labels_predicts_its_outputs(tmp_path: Any) -> None:
    def of_pairs(model: nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        scores = model(x=batch["x"])["logits"]
        return F.softplus(scores[:, 1] - scores[:, 0]).mean(), scores[:, :2]

    data = samples(labels=False)
    trainer = make_trainer(tmp_path, compute_loss=of_pairs, label_names=[])
    found, loss = trainer.predict(data), trainer.evaluate(data)["eval_loss"]
    assert found.predictions.shape == (len(data), 2)
    assert found.label_ids is None
    assert found.metrics["test_loss"] == loss
    assert make_trainer(tmp_path, compute_loss=of_pairs).predict(data).predictions.shape == (len(data), CLASSES)
    assert "test_loss" not in make_trainer(tmp_path, label_names=[]).predict(data).metrics


def test_where_no_label_counts_there_is_no_loss_to_tell(tmp_path: Any) -> None:
    ignored = [each | {"labels": torch.tensor(-100)} for each in samples(10)]
    assert np.isnan(make_trainer(tmp_path).evaluate(ignored)["eval_loss"])
    mixed = ignored + samples(3)
    logits, labels = whole(Classifier(), samples(3))
    assert make_trainer(tmp_path, per_device_eval_batch_size=4).evaluate(mixed)["eval_loss"] == pytest.approx(
        F.cross_entropy(logits, labels).item(), rel=1e-6
    )


class Stream(IterableDataset[Any]):
    def __init__(self, rows: list[Any]) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[Any]:
        return iter(self.rows)


def test_iterable_datasets_are_evaluated_alike(tmp_path: Any) -> None:
    trainer = make_trainer(tmp_path, compute_metrics=accuracy)
    expected, found = trainer.evaluate(samples()), trainer.evaluate(Stream(samples()))
    assert {name for name in found if name.startswith("eval_")} == set(expected)
    assert (found["eval_loss"], found["eval_accuracy"]) == (expected["eval_loss"], expected["eval_accuracy"])


@pytest.mark.parametrize("dataset", [[], Stream([])])
def test_an_empty_dataset_is_refused(tmp_path: Any, dataset: Any) -> None:
    trainer = make_trainer(tmp_path)
    for call in (trainer.evaluate, trainer.predict):
        with pytest.raises(ValueError, match="dataset to evaluate is empty; give at least one sample"):
            call(dataset)


def test_a_model_without_a_loss_is_refused_unless_metrics_are_all_that_is_wanted(tmp_path: Any) -> None:
    class Silent(Classifier):
        def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
            return super().forward(x)

    with pytest.raises(ValueError, match="Silent returned no loss but a dict with logits"):
        make_trainer(tmp_path, Silent()).evaluate(samples())
    found = make_trainer(tmp_path, Silent(), compute_metrics=accuracy).evaluate(samples())
    assert "eval_accuracy" in found
    assert "eval_loss" not in found


def test_an_evaluation_is_broken_off_when_the_run_must_leave(tmp_path: Any) -> None:
    class Leaving(list[Any]):
        reads = 0

        def __getitem__(self, index: Any) -> Any:
            self.reads += 1
            if self.reads == 10:
                trainer.run.requests.exit_code = 143
            return super().__getitem__(index)

    dataset = Leaving(samples())
    trainer = make_trainer(tmp_path)
    with pytest.raises(EvaluationInterrupted):
        trainer.evaluate(dataset)
    assert dataset.reads < 30
    assert trainer.run.model.training


def test_collections_of_metrics_are_spread(tmp_path: Any) -> None:
    metrics = MetricCollection([MulticlassAccuracy(CLASSES), MulticlassF1Score(CLASSES)])
    found = make_trainer(tmp_path, metrics=metrics).evaluate(samples())
    assert {"eval_MulticlassAccuracy", "eval_MulticlassF1Score"} <= set(found)
    assert all(isinstance(value, float) for value in found.values())


def test_numbers_come_as_pythons_and_names_get_the_prefix_once(tmp_path: Any) -> None:
    def compute(prediction: EvalPrediction) -> dict[str, Any]:
        return {"a": torch.tensor(1.5), "eval_b": np.float32(2.5), "c": np.array([3]), "d": "text"}

    trainer = make_trainer(tmp_path, compute_metrics=compute)
    found = trainer.evaluate(samples())
    assert [found[name] for name in ("eval_a", "eval_b", "eval_c", "eval_d")] == [1.5, 2.5, 3, "text"]
    assert type(found["eval_a"]) is type(found["eval_b"]) is float
    assert "other_eval_b" in trainer.evaluate(samples(), metric_key_prefix="other")


def test_compute_metrics_must_return_a_dict(tmp_path: Any) -> None:
    with pytest.raises(TypeError, match="compute_metrics returned a float; return a dict"):
        make_trainer(tmp_path, compute_metrics=lambda prediction: 0.5).evaluate(samples())


def test_evaluate_needs_a_dataset(tmp_path: Any) -> None:
    with pytest.raises(ValueError, match=r"evaluate\(\) needs eval_dataset"):
        make_trainer(tmp_path).evaluate()


def test_half_precision_losses_are_summed_in_full(tmp_path: Any) -> None:
    class Half(Classifier):
        def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
            return {"loss": torch.tensor(1.0, dtype=torch.bfloat16), "logits": x}

    found = make_trainer(tmp_path, Half(), per_device_eval_batch_size=1).evaluate(samples(1000))
    assert found["eval_loss"] == 1.0


def test_callbacks_hear_of_evaluations(tmp_path: Any) -> None:
    heard: list[Any] = []

    class Listener(Callback):
        def on_evaluate_begin(self, run: Run) -> None:
            heard.append("begin")

        def on_evaluate_end(self, run: Run, metrics: dict[str, Any] | None) -> None:
            heard.append("broken off" if metrics is None else f"end {min(metrics)}")

        def on_evaluate(self, run: Run, metrics: dict[str, Any]) -> None:
            heard.append(sorted(metrics)[0])

        def on_predict(self, run: Run, metrics: dict[str, Any]) -> None:
            heard.append(sorted(metrics)[0])

    trainer = make_trainer(tmp_path, callbacks=[Listener()])
    trainer.evaluate(samples())
    trainer.predict(samples())
    with pytest.raises(ValueError, match="empty"):
        trainer.evaluate([])
    assert heard == [
        *("begin", "end eval_loss", "eval_loss"),
        *("begin", "end test_loss", "test_loss"),
        *("begin", "broken off"),
    ]


# Static shapes


class Plain(Classifier):
    """In float64, so that rounding tells nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.double()


def exact_samples(length: int, labels: bool = True) -> list[dict[str, torch.Tensor]]:
    return [each | {"x": each["x"].double()} for each in samples(length, labels)]


def static_and_single(strategy: SingleDevice, batch_size: int, tmp_path: Any = UNUSED, **given: Any) -> list[Trainer]:
    """Two Trainers that evaluate batches of one size."""
    return [
        make_trainer(
            tmp_path, Plain(), strategy=each, per_device_eval_batch_size=batch_size // each.devices,
            metrics={"streamed": MulticlassAccuracy(CLASSES, average="micro")}, compute_metrics=accuracy, **given,
        )
        for each in (strategy, SingleDevice("cpu"))
    ]  # fmt: skip


def check_same(found: PredictionOutput, expected: PredictionOutput) -> None:
    np.testing.assert_allclose(found.predictions, expected.predictions, rtol=1e-12)
    np.testing.assert_equal(found.label_ids, expected.label_ids)
    names = {"test_loss", "test_accuracy", "test_streamed"} & expected.metrics.keys()
    assert names == {"test_loss", "test_accuracy", "test_streamed"} & found.metrics.keys()
    assert {name: found.metrics[name] for name in names} == pytest.approx({n: expected.metrics[n] for n in names})


@pytest.mark.parametrize("kind", STATIC)
@settings(max_examples=12)
@given(st.integers(1, 30), st.integers(1, 8))
@example(13, 4)
def test_static_shapes_change_nothing_in_what_is_found(kind: str, length: int, batch_size: int) -> None:
    strategy = STATIC[kind]()
    size = batch_size * strategy.devices
    static, single = static_and_single(strategy, size)
    check_same(static.predict(exact_samples(length)), single.predict(exact_samples(length)))
    assert static.evaluate(exact_samples(length))["eval_loss"] == pytest.approx(
        single.evaluate(exact_samples(length))["eval_loss"], rel=1e-12
    )
    assert strategy.sizes("evaluation") == [size]


def test_predictions_without_labels_are_always_filled_up_and_cut(tmp_path: Any) -> None:
    def compute_loss(model: nn.Module, batch: Any) -> torch.Tensor:
        raise AssertionError("nobody asked for a loss")

    strategy = Static()
    dataset = exact_samples(13, labels=False)
    trainer = make_trainer(tmp_path, Plain(), strategy=strategy, compute_loss=compute_loss)
    found = trainer.predict(dataset).predictions
    np.testing.assert_allclose(found, make_trainer(tmp_path, Plain()).predict(dataset).predictions, rtol=1e-12)
    assert strategy.sizes("evaluation") == [8]


@pytest.mark.parametrize("pair", [False, True])
def test_a_loss_that_cannot_be_filled_up_is_exact_too(tmp_path: Any, pair: bool) -> None:
    def compute_loss(model: nn.Module, batch: Any) -> Any:
        losses = F.cross_entropy(model(**{"x": batch["x"]})["logits"], batch["labels"], reduction="none")
        return (losses.sum(), torch.tensor(len(losses))) if pair else losses.mean()

    strategy = WithOperands()
    static, single = static_and_single(strategy, 4, tmp_path, compute_loss=compute_loss)
    check_same(static.predict(exact_samples(13)), single.predict(exact_samples(13)))
    assert strategy.sizes("evaluation") == [4, 1]


def test_static_evaluation_works_on_the_host_while_the_device_goes_on(tmp_path: Any) -> None:
    happened: list[Any] = []

    class Marking(DeviceInfo):
        def mark_step(self) -> None:
            happened.append("dispatched")

    class Dispatching(Static):
        def __init__(self) -> None:
            super().__init__()
            self.device_info = Marking(self.device)

    class Counting(MeanMetric):
        def update(self, predictions: torch.Tensor, labels: torch.Tensor) -> None:
            happened.append(len(predictions))
            assert len(predictions) == len(labels)
            super().update(predictions.double().mean())

    make_trainer(tmp_path, Plain(), strategy=Dispatching(), metrics=Counting()).evaluate(exact_samples(19))
    assert happened == ["dispatched", "dispatched", 8, "dispatched", 8, 3]


def test_a_static_evaluation_within_training_is_filled_up_as_the_training_is(tmp_path: Any) -> None:
    def losses(strategy: SingleDevice) -> list[float]:
        found = []

        class Noting(Callback):
            def on_evaluate(self, run: Run, metrics: dict[str, Any]) -> None:
                found.append(metrics["eval_loss"])

        model = Plain()
        model.dropout = model.frozen = nn.Identity()
        make_trainer(
            tmp_path, model, train_dataset=exact_samples(10), eval_dataset=exact_samples(11), num_train_epochs=3,
            eval_strategy="epoch", per_device_train_batch_size=4, per_device_eval_batch_size=4, learning_rate=0.1,
            strategy=strategy, callbacks=[Noting()],
        ).train()  # fmt: skip
        return found

    strategy = Static()
    assert losses(strategy) == pytest.approx(losses(SingleDevice("cpu")), rel=1e-9)
    assert strategy.sizes("training") == strategy.sizes("evaluation") == [4]


def test_an_evaluation_never_drops_its_last_batch(tmp_path: Any) -> None:
    trainer = make_trainer(tmp_path, per_device_eval_batch_size=4, dataloader_drop_last=True)
    assert len(trainer.predict(samples(9)).predictions) == 9


class TwoTargets(Classifier):
    """Takes a second column of labels, which its loss does not need."""

    def forward(
        self, x: torch.Tensor, labels: torch.Tensor | None = None, other: torch.Tensor | None = None
    ) -> dict[str, torch.Tensor]:
        return super().forward(x, labels)


@pytest.mark.parametrize("names", [["label"], ["labels", "others"], ["others", "other"]])
def test_a_wrong_name_of_a_label_is_refused(tmp_path: Any, names: list[str]) -> None:
    def nothing(prediction: EvalPrediction) -> dict[str, Any]:
        return {}

    data = [{**each, "other": torch.tensor(1)} for each in samples(9)]
    wrong = next(name for name in names if name not in ("labels", "other"))
    made = make_trainer(tmp_path, TwoTargets(), label_names=names, compute_metrics=nothing, eval_dataset=data)
    with pytest.raises(
        ValueError, match=f"label_names has '{wrong}', but a batch is a dict with the entries x, labels"
    ):
        made.evaluate()
    if len(names) > 1:
        with pytest.raises(ValueError, match=f"label_names has '{wrong}'"):
            made.predict(data)
    without = [{"x": each["x"]} for each in samples(9)]
    assert made.predict(without).label_ids is None


class InParts(torch.nn.Module):
    """Its output has two parts besides the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 3)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.layer(x)
        return {"loss": torch.nn.functional.cross_entropy(logits, labels), "scores": logits, "hidden": 2 * x}


def test_a_metric_that_needs_one_part_of_the_output_is_named() -> None:
    data = [{"x": torch.ones(4), "labels": torch.tensor(number % 3)} for number in range(6)]
    args = TrainingArguments(UNUSED, use_cpu=True, report_to="none", disable_tqdm=True)
    metrics = {"accuracy": MulticlassAccuracy(3, average="micro")}
    with pytest.raises(
        ValueError, match=r"metrics\['accuracy'\] got predictions that are a tuple and labels .* choose"
    ):
        Trainer(InParts(), args, eval_dataset=data, metrics=metrics).evaluate()
    chosen = Trainer(
        InParts(), args, eval_dataset=data, metrics=metrics, preprocess_logits_for_metrics=lambda p, _: p[0]
    )
    assert chosen.evaluate()["eval_accuracy"] == pytest.approx(1 / 3)
