"""Evaluation by several processes: the same as by one."""

from __future__ import annotations

import pickle
import time
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from kit.ranks import on_ranks
from kit.trainer import UNUSED
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.data import IterableDataset
from torchmetrics import Metric as TorchMetric
from torchmetrics import SpearmanCorrCoef
from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC

from trainer_kit import EvalPrediction, Trainer, TrainingArguments
from trainer_kit.errors import EvaluationInterrupted
from trainer_kit.loop.evaluation import PredictionOutput

CLASSES = 3
SPEEDS = ("runtime", "samples_per_second", "steps_per_second")


class Classifier(nn.Module):
    """Draws in evaluation too."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, CLASSES, dtype=torch.float64)
        self.norm = nn.BatchNorm1d(4, dtype=torch.float64)

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        logits = self.layer(self.norm(x)) + 0.1 * torch.rand(len(x), CLASSES, dtype=torch.float64)
        return {"logits": logits} if labels is None else {"loss": F.cross_entropy(logits, labels), "logits": logits}


def samples(length: int) -> list[dict[str, torch.Tensor]]:
    """Labels that leave some batches without an item."""
    generator = torch.Generator().manual_seed(1)
    labels = [-100 if index % 4 == 1 else index * 7 % CLASSES for index in range(length)]
    return [
        {"x": torch.randn(4, generator=generator, dtype=torch.float64), "labels": torch.tensor(label)}
        for label in labels
    ]


class Stream(IterableDataset[Any]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[Any]:
        return iter(samples(self.length))


class Ranking(SpearmanCorrCoef):
    """Of the first class's score with the label."""

    def update(self, predictions: torch.Tensor, labels: torch.Tensor) -> None:
        super().update(predictions[:, 0], labels.double())


class Constant(TorchMetric):
    """The mean of what processes hold that have seen a sample."""

    full_state_update = False
    value: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("value", torch.tensor(0.0), dist_reduce_fx="mean")

    def update(self, predictions: torch.Tensor, labels: torch.Tensor) -> None:
        self.value = torch.tensor(3.0)

    def compute(self) -> torch.Tensor:
        return self.value


class Mean:
    """A metric that is not torchmetrics'."""

    def __init__(self) -> None:
        self.reset()

    def update(self, predictions: torch.Tensor, labels: torch.Tensor) -> None:
        self.total += predictions.sum().item()
        self.count += len(labels)

    def compute(self) -> float:
        return self.total / self.count

    def reset(self) -> None:
        self.total, self.count = 0.0, 0

    def merge_state(self, others: Iterable[Mean]) -> None:
        for other in others:
            self.total, self.count = self.total + other.total, self.count + other.count


calls = 0


def compute_metrics(prediction: EvalPrediction) -> dict[str, Any]:
    global calls
    calls += 1
    return {"weighted": (prediction.predictions[:, 0] * np.arange(1, 1 + len(prediction.label_ids))).sum()}


def make_trainer(batch_size: int, **given: Any) -> Trainer:
    args = TrainingArguments(
        UNUSED, use_cpu=True, report_to="none", disable_tqdm=True, log_level="error",
        per_device_eval_batch_size=batch_size,
    )  # fmt: skip
    return Trainer(Classifier(), args, **given)


def metrics() -> dict[str, Any]:
    warnings.simplefilter("ignore")  # torchmetrics says much of small datasets
    warnings.filterwarnings("error", message=".*called before the ``update``")
    return {
        "accuracy": MulticlassAccuracy(CLASSES, average="micro", ignore_index=-100),
        "auroc": MulticlassAUROC(CLASSES, ignore_index=-100),
        "ranking": Ranking(),
        "constant": Constant(),
        "mean": Mean(),
    }


def outputs(lengths: Iterable[int], batch_sizes: Iterable[int]) -> list[tuple[PredictionOutput, int]]:
    """Predictions and metrics, with how often compute_metrics was called for them here."""
    found = []
    for batch_size in batch_sizes:
        trainer = make_trainer(batch_size, metrics=metrics(), compute_metrics=compute_metrics)
        for length in lengths:
            before = calls
            found.append((trainer.predict(samples(length)), calls - before))
            found.append((trainer.predict(Stream(length)), calls - before))
            found.append((PredictionOutput(None, None, trainer.evaluate(samples(length))), calls - before))
    return found


def untimed(metrics: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in metrics.items() if not name.endswith(SPEEDS)}


@pytest.mark.distributed
@pytest.mark.parametrize("processes", [2, 3])
def test_all_is_as_with_one_process(processes: int) -> None:
    lengths, batch_sizes = range(1, 11), range(1, 5)
    expected = outputs(lengths, batch_sizes)
    for rank, found in enumerate(on_ranks(processes, outputs, lengths, batch_sizes)):
        assert len(found) == len(expected) == 120
        for (ours, calls_here), (alone, calls_alone) in zip(found, expected, strict=True):
            np.testing.assert_array_equal(ours.predictions, alone.predictions)
            np.testing.assert_array_equal(ours.label_ids, alone.label_ids)
            assert list(ours.metrics) == list(alone.metrics)
            assert untimed(ours.metrics) == pytest.approx(untimed(alone.metrics), rel=1e-12, abs=0, nan_ok=True)
            assert calls_here == (calls_alone if rank == 0 else 0)


def largest_share(keep: bool) -> int:
    """Bytes of the largest object that this process got from another."""
    trainer = make_trainer(2, metrics=metrics(), compute_metrics=compute_metrics)
    strategy, sizes = trainer.run.strategy, [0]
    trainer.evaluate(samples(2))  # the first compares versions and arguments

    def watched(gather: Any) -> Any:
        def gathered(value: Any) -> Any:
            found = gather(value)
            sizes.extend(len(pickle.dumps(each)) for rank, each in enumerate(found) if rank != strategy.rank)
            return found

        return gathered

    for name in ("gather_object", "gather_to_main"):
        setattr(strategy.collectives, name, watched(getattr(strategy.collectives, name)))
    (trainer.predict if keep else trainer.evaluate)(samples(100))
    return max(sizes)


@pytest.mark.distributed
def test_what_only_the_main_process_needs_is_sent_to_it_alone() -> None:
    main, other = on_ranks(2, largest_share, keep=False)
    assert main > 2000
    assert other < 500
    assert min(on_ranks(2, largest_share, keep=True)) > 2000


def speeds() -> dict[str, float]:
    return make_trainer(2).evaluate(samples(7))


@pytest.mark.distributed
def test_speeds_are_of_all_processes_and_the_same_on_all() -> None:
    found = on_ranks(2, speeds)
    assert found[0] == found[1]
    runtime = found[0]["eval_runtime"]
    assert found[0]["eval_samples_per_second"] * runtime == pytest.approx(7)
    assert found[0]["eval_steps_per_second"] * runtime == pytest.approx(2)


class Told(list[Any]):
    """Rank 1 is told to leave while its third sample is read."""

    def __init__(self, trainer: Trainer, announces: bool) -> None:
        super().__init__(samples(30))
        self.run = trainer.run
        self.announces = announces
        self.reads = 0

    def __getitem__(self, index: Any) -> Any:
        self.reads += 1
        if self.reads == 3:
            if self.run.strategy.rank == 1:
                self.run.requests.exit_code = 143
                if self.announces:
                    self.run.strategy.session.announce_preemption()
            deadline = time.monotonic() + 60
            while self.announces and not self.run.strategy.session.is_preempted and time.monotonic() < deadline:
                time.sleep(0.01)
        return super().__getitem__(index)


def leave(announces: bool) -> tuple[str, int, int]:
    """How it ended, the samples that were read here, and how often metrics were computed here."""
    trainer = make_trainer(1, metrics=metrics(), compute_metrics=compute_metrics)
    dataset, before, outcome = Told(trainer, announces), calls, "predicted"
    try:
        trainer.predict(dataset)
    except EvaluationInterrupted:
        outcome = "interrupted"
    return outcome, dataset.reads, calls - before


@pytest.mark.distributed
def test_where_one_process_is_told_to_leave_all_break_off_the_evaluation() -> None:
    assert on_ranks(3, leave, announces=True) == [("interrupted", 3, 0)] * 3
    found = on_ranks(3, leave, announces=False)  # the others hear of it in the end, before anything is gathered
    assert found == [("interrupted", 10, 0), ("interrupted", 3, 0), ("interrupted", 10, 0)]


def refuse(what: str) -> str:
    class Unmergeable(Mean):
        merge_state = property()

    def broken(prediction: EvalPrediction) -> dict[str, Any]:
        raise ZeroDivisionError(f"{len(prediction.predictions)} samples")

    options: dict[str, dict[str, Any]] = {
        "empty": {"metrics": metrics()},
        "unmergeable": {"metrics": {"a": Unmergeable()}},
        "broken": {"compute_metrics": broken},
    }
    try:
        make_trainer(2, **options[what]).evaluate(samples(0 if what == "empty" else 5))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "evaluated"


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("empty", "ValueError: the dataset to evaluate is empty"),
        ("unmergeable", "TypeError: metrics['a'] is a Unmergeable without merge_state(others)"),
        ("broken", "ZeroDivisionError: 5 samples"),
    ],
)
def test_errors_are_raised_on_all_processes(what: str, said: str) -> None:
    found = on_ranks(2, refuse, what)
    assert [text[: len(said)] for text in found] == [said, said]


class Shifting(nn.Module):
    """Predicts the next token: the first label of each row counts for nothing."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scores = nn.Embedding(5, 5, dtype=torch.float64)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.scores(input_ids)
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return {"loss": loss, "logits": logits}


def shifted(length: int) -> tuple[float, bool | None]:
    """The loss of token rows of many lengths, and what is known of the model afterwards."""
    rows = [torch.arange(2 + index * 3 % 5) % 5 for index in range(length)]
    args = TrainingArguments(UNUSED, use_cpu=True, report_to="none", disable_tqdm=True, per_device_eval_batch_size=1)
    trainer = Trainer(Shifting(), args)
    loss = trainer.evaluate([{"input_ids": row, "labels": row} for row in rows])["eval_loss"]
    return loss, trainer._probe.loss.shifts


@pytest.mark.distributed
@pytest.mark.parametrize("length", [1, 5])
def test_items_are_counted_as_by_one_process(length: int) -> None:
    expected = shifted(length)
    for loss, shifts in on_ranks(3, shifted, length):
        assert loss == pytest.approx(expected[0], rel=1e-12)
        assert shifts is expected[1] is True


def by_own_loss() -> list[list[float]]:
    """With a compute_loss that calls the model that it knows, not the one that it is given."""
    model = Classifier()
    args = TrainingArguments(UNUSED, use_cpu=True, report_to="none", disable_tqdm=True, per_device_eval_batch_size=2)

    def compute_loss(given: nn.Module, batch: Any) -> torch.Tensor:
        loss: torch.Tensor = model(**batch)["loss"]
        return loss

    found = Trainer(model, args, compute_loss=compute_loss).predict(samples(5)).predictions
    return found.tolist()  # type: ignore[no-any-return]


@pytest.mark.distributed
def test_the_model_may_be_called_by_itself() -> None:
    assert on_ranks(2, by_own_loss) == [by_own_loss()] * 2


def evaluate_with_calls(length: int, streams: bool, communicates: bool) -> tuple[float, float, int]:
    """The loss and a metric of a second evaluation, and how often the loss function was called."""
    calls = 0

    def compute_loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        nonlocal calls
        calls += 1
        output: dict[str, torch.Tensor] = model(batch["x"], batch["labels"])
        if communicates and dist.is_initialized():
            dist.all_reduce(torch.ones(1))  # as a contrastive loss that gathers the samples of all processes
        return output

    args = TrainingArguments(UNUSED, use_cpu=True, per_device_eval_batch_size=2, report_to="none", disable_tqdm=True)
    dataset = Stream(length) if streams else samples(length)
    metrics = {"accuracy": MulticlassAccuracy(CLASSES, ignore_index=-100)}
    trainer = Trainer(Classifier(), args, compute_loss=compute_loss, eval_dataset=dataset, metrics=metrics)
    found = trainer.evaluate()
    return found["eval_loss"], float(found["eval_accuracy"]), calls


@pytest.mark.distributed
@pytest.mark.parametrize("streams", [False, True])
def test_a_loss_with_collectives_is_called_as_often_on_all_processes(streams: bool) -> None:
    """Batches of 2: 5 samples are 3 batches, of which the last process of 2 has one, and that of 3 one too."""
    for length, processes, most in ((5, 2, 2), (8, 3, 2), (7, 3, 2)):
        loss, accuracy, _ = evaluate_with_calls(length, streams, communicates=True)
        for own_loss, own_accuracy, calls in on_ranks(
            processes, evaluate_with_calls, length, streams, True, timeout=60
        ):
            assert own_loss == pytest.approx(loss, rel=1e-12)
            assert own_accuracy == pytest.approx(accuracy, rel=1e-6)
            assert calls == most
    quiet = on_ranks(2, evaluate_with_calls, 5, streams, False)
    assert [calls for *_, calls in quiet] == [2, 1], "a dummy batch would count in what the function collects"
