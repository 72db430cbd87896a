"""Streaming metrics, joined over processes that a stand-in for a strategy plays one after the other."""

from __future__ import annotations

import math
import pickle
import warnings
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.far_info import FarInfo
from torchmetrics import (
    MaxMetric,
    MeanMetric,
    MetricCollection,
    PearsonCorrCoef,
    SpearmanCorrCoef,
)
from torchmetrics import Metric as TorchMetric
from torchmetrics.classification import (
    MulticlassAccuracy,
    MulticlassAUROC,
    MulticlassConfusionMatrix,
    MulticlassF1Score,
    MulticlassPrecision,
)
from torchmetrics.wrappers import ClasswiseWrapper, MinMaxMetric

from trainer_kit.loop.metrics import (
    MeanLoss,
    begin_metrics,
    gather_metrics,
    joined_result,
    metrics_by_name,
    scores_by_name,
)
from trainer_kit.strategies.base import Strategy
from trainer_kit.strategies.collectives import Collectives

_FLOATS = st.floats(-60000, 60000, width=32)

CLASSES = 3
T = TypeVar("T")


@given(
    st.lists(st.tuples(_FLOATS, st.integers(0, 50), st.sampled_from(["mean", "sum", "sum, counted on the device"]))),
    st.sampled_from([torch.float64, torch.float32, torch.bfloat16]),
)
def test_a_loss_that_is_read_at_once_changes_no_bit(passes: list[tuple[float, int, str]], dtype: torch.dtype) -> None:
    near, far = Strategy(), Strategy()
    far.device_info = FarInfo(far.device)
    means = [MeanLoss(near), MeanLoss(far)]
    for value, items, kind in passes:
        count = {"mean": None, "sum": items}.get(kind, torch.tensor(items))
        for mean in means:
            mean.add(torch.tensor(value, dtype=dtype, requires_grad=True), count, items)
    assert means[0].sums() == means[1].sums()


class Player(Strategy):
    """One process of several; the main one plays last."""

    def __init__(self, rank: int, world_size: int, sent: list[Any]) -> None:
        super().__init__()
        self.collectives = Sending(rank, world_size, sent)


class Sending(Collectives):
    def __init__(self, rank: int, world_size: int, sent: list[Any]) -> None:
        super().__init__(rank, world_size=world_size)
        self.sent = sent

    def gather_to_main(self, value: T) -> list[T]:
        if self.is_main:
            return [value, *reversed(self.sent)]
        self.sent.append(pickle.loads(pickle.dumps(value)))
        return []


def joined(make: Callable[[], Any], batches: list[tuple[torch.Tensor, torch.Tensor]], processes: int) -> Any:
    """The result on the main process, which has evaluated twice."""
    metrics = [{"one": make()} for _ in range(processes)]
    for _ in range(2):
        sent: list[Any] = []
        for rank in reversed(range(processes)):
            strategy = Player(rank, processes, sent)
            begin_metrics(metrics[rank], strategy)
            for predictions, labels in batches[rank::processes]:
                metrics[rank]["one"].update(predictions, labels)
            others = gather_metrics(metrics[rank], strategy, updated=rank < len(batches))
        result = joined_result(metrics[0]["one"], [other["one"] for other in others])
    return result


def data(samples: int, size: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(samples)
    scores = torch.randn(samples, CLASSES, generator=generator, dtype=torch.float64).softmax(-1)
    labels = torch.randint(CLASSES, (samples,), generator=generator)
    return list(zip(scores.split(size), labels.split(size), strict=True))


def of_two_vectors(kind: type[TorchMetric]) -> Callable[[], TorchMetric]:
    class OfVectors(kind):  # type: ignore[misc, valid-type]
        def update(self, predictions: torch.Tensor, labels: torch.Tensor) -> None:
            super().update(predictions[:, 0].float(), labels.float())

    return OfVectors


def of_one_vector(kind: type[TorchMetric]) -> Callable[[], TorchMetric]:
    class OfVector(kind):  # type: ignore[misc, valid-type]
        def update(self, predictions: torch.Tensor, labels: torch.Tensor) -> None:
            super().update(predictions[:, 0])

    return OfVector


class Scores(TorchMetric):
    """Lists that are not joined to one tensor, with more entries where there were more samples; and other states."""

    full_state_update = False
    rows: list[torch.Tensor]
    spans: list[torch.Tensor]
    least: torch.Tensor
    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("rows", [], dist_reduce_fx=None)
        self.add_state("none", [], dist_reduce_fx="cat")
        self.add_state("spans", [], dist_reduce_fx=lambda values: [torch.cat(values)])
        self.add_state("least", torch.tensor(math.inf, dtype=torch.float64), dist_reduce_fx="min")
        self.add_state("seen", torch.tensor(0), dist_reduce_fx=lambda values: values.sum(0))

    def update(self, predictions: torch.Tensor, labels: torch.Tensor) -> None:
        self.rows.extend(predictions)
        self.spans.append(predictions.max(-1).values)
        self.least = torch.minimum(self.least, predictions.min())
        self.seen += len(labels)

    def compute(self) -> torch.Tensor:
        assert all(row.shape == (CLASSES,) for row in self.rows)
        assert len(self.rows) == self.seen
        return torch.stack([torch.stack(self.rows).sum(), torch.cat(self.spans).sum(), self.least])


def collection() -> MetricCollection:
    """Two of them share their states, once the first batch has shown that they can."""
    return MetricCollection([
        MulticlassF1Score(CLASSES), MulticlassPrecision(CLASSES), MulticlassConfusionMatrix(CLASSES),
        MetricCollection({"inner": MulticlassAUROC(CLASSES)}),
    ])  # fmt: skip


KINDS: dict[str, Callable[[], Any]] = {
    "accuracy": lambda: MulticlassAccuracy(CLASSES),
    "auroc, lists": lambda: MulticlassAUROC(CLASSES),
    "auroc, on the host": lambda: MulticlassAUROC(CLASSES, compute_on_cpu=True),
    "auroc, sums": lambda: MulticlassAUROC(CLASSES, thresholds=20),
    "spearman": of_two_vectors(SpearmanCorrCoef),
    "pearson, not reduced": of_two_vectors(PearsonCorrCoef),
    "mean": of_one_vector(MeanMetric),
    "max": of_one_vector(MaxMetric),
    "lists and functions": Scores,
    "collection": collection,
    "wrapped": lambda: ClasswiseWrapper(MulticlassAccuracy(CLASSES, average=None)),
    "extremes": lambda: MinMaxMetric(MulticlassAccuracy(CLASSES)),
    "a sum": lambda: MulticlassAccuracy(CLASSES) + 2 * MulticlassF1Score(CLASSES),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("processes", [2, 3])
@settings(max_examples=15)
@given(st.integers(1, 12), st.integers(1, 4))
def test_torchmetrics_are_joined_as_if_there_was_one_process(
    kind: str, processes: int, samples: int, size: int
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torchmetrics says much of small datasets
        warnings.filterwarnings("error", message=".*called before the ``update``")
        if kind == "pearson, not reduced":
            samples, size = 8 * samples, 8  # torchmetrics gives NaN where a process had one sample
        batches = data(samples, size)
        alone = KINDS[kind]()
        for batch in batches:
            alone.update(*batch)
        expected, found = alone.compute(), joined(KINDS[kind], batches, processes)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5, equal_nan=True)


class Labels(TorchMetric):
    """How many labels are at least so large."""

    full_state_update = False
    number: torch.Tensor

    def __init__(self, least: int) -> None:
        super().__init__()
        self.least = least
        self.add_state("number", torch.tensor(0), dist_reduce_fx="sum")

    def update(self, predictions: torch.Tensor, labels: torch.Tensor) -> None:
        self.number = self.number + (labels >= self.least).sum()

    def compute(self) -> torch.Tensor:
        return self.number


def test_collections_may_share_states_on_some_processes_only() -> None:
    """They do where the first batch shows no difference: here, where no label is 0."""
    batches = [(torch.zeros(2), torch.tensor(labels)) for labels in ([0, 2], [1, 2], [0, 1], [2, 1])]
    assert joined(lambda: MetricCollection({"all": Labels(0), "some": Labels(1)}), batches, 2) == {"all": 8, "some": 6}


def test_a_metric_joins_with_others_no_more_than_once() -> None:
    """Afterwards each has its own states, and torchmetrics its own ways."""
    metric = MulticlassAccuracy(CLASSES, average="micro")
    other = MulticlassAccuracy(CLASSES, average="micro")
    metric.update(torch.tensor([0, 1]), torch.tensor([0, 0]))
    other.update(torch.tensor([1, 1, 2]), torch.tensor([1, 1, 2]))
    assert joined_result(metric, [[other.metric_state]]) == pytest.approx(4 / 5)
    assert metric.tp == 1
    assert metric.distributed_available_fn is other.distributed_available_fn


class Mean:
    """A metric that is not torchmetrics'."""

    def __init__(self) -> None:
        self.reset()

    def update(self, predictions: torch.Tensor, labels: torch.Tensor) -> None:
        self.values.append(predictions.mean().item())

    def compute(self) -> float:
        return sum(self.values) / len(self.values)

    def reset(self) -> None:
        self.values: list[float] = []


class Mergeable(Mean):
    """On a device, as far as can be seen."""

    device = torch.device("cpu")

    def to(self, device: torch.device) -> None:
        self.device = device

    def update(self, predictions: torch.Tensor, labels: torch.Tensor) -> None:
        super().update(predictions, labels)
        self.device = torch.device("meta")

    def merge_state(self, others: Iterable[Mergeable]) -> None:
        for other in others:
            assert other.device == torch.device("cpu")  # the main process may not have the other's
            self.values += other.values


@pytest.mark.parametrize("processes", [1, 2, 3])
@pytest.mark.parametrize("samples", [1, 2, 7])
def test_others_are_merged(samples: int, processes: int) -> None:
    batches = data(samples, 1)
    assert joined(Mergeable, batches, processes) == pytest.approx(
        torch.stack([predictions for predictions, _ in batches]).mean().item()
    )


def test_a_merge_leaves_the_metric_as_it_was() -> None:
    own, other = Mergeable(), Mergeable()
    own.values, other.values = [1.0], [3.0]
    for _ in range(2):
        assert joined_result(own, [other]) == 2.0
    assert own.values == [1.0]


class Listed(TorchMetric):
    """Returns its list, which is one with a single process too."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("rows", [], dist_reduce_fx="cat")

    def update(self, predictions: torch.Tensor, labels: torch.Tensor) -> None:
        self.rows.append(labels)

    def compute(self) -> int:
        assert isinstance(self.rows, list)
        return sum(len(each) for each in self.rows)


@pytest.mark.parametrize("processes", [1, 2])
def test_lists_of_torchmetrics_stay_lists(processes: int) -> None:
    batches = [(torch.zeros(2), torch.zeros(2)) for _ in range(4)]
    assert joined(Listed, batches, processes) == 8


def test_values_of_one_name_get_that_of_their_metric() -> None:
    results = {"acc": 0.5, "f1": {"raw": 1, "max": 2}, "auc": {"raw": 3, "acc": 4}, "own": {"own": 5}}
    assert scores_by_name(results) == {"acc": 0.5, "f1_raw": 1, "max": 2, "auc_raw": 3, "auc_acc": 4, "own": 5}


def test_those_that_cannot_be_joined_are_refused_before_the_evaluation() -> None:
    begin_metrics({"one": Mean()}, Strategy())
    said = r"metrics\['one'\] is a Mean without merge_state\(others\), so that what 2 processes count cannot be joined"
    with pytest.raises(TypeError, match=said):
        begin_metrics({"one": Mean()}, Player(1, 2, []))

    class Local(Mergeable):
        pass

    begin_metrics({"one": Local()}, Strategy())
    with pytest.raises(TypeError, match=r"metrics\['one'\] is a Local that cannot be sent .*Local.*make it picklable"):
        begin_metrics({"one": Local()}, Player(0, 2, []))


def test_metrics_get_names() -> None:
    assert metrics_by_name(None) == {}
    one, other = MulticlassAccuracy(3), MulticlassF1Score(3)
    assert metrics_by_name(one) == {"multiclassaccuracy": one}
    assert metrics_by_name([one, other]) == {"multiclassaccuracy": one, "multiclassf1score": other}
    assert metrics_by_name({"a": one, "b": one}) == {"a": one, "b": one}
    assert list(metrics_by_name(iter([one]))) == ["multiclassaccuracy"]
    with pytest.raises(ValueError, match=r"several of one class \(multiclassaccuracy\); give a dict"):
        metrics_by_name([one, MulticlassAccuracy(4)])
    with pytest.raises(TypeError, match=r"metrics\['function'\] is a function without update, compute, reset"):
        metrics_by_name([joined])
    with pytest.raises(TypeError, match=r"metrics\['a'\] is the class MulticlassAccuracy; give an object of it"):
        metrics_by_name({"a": MulticlassAccuracy})


@pytest.mark.parametrize("static", [False, True])
def test_metrics_count_where_their_batches_are(static: bool) -> None:
    strategy = Strategy()
    strategy.device, strategy.static_shapes = torch.device("meta"), static
    metric = MeanMetric()
    begin_metrics({"mean": metric}, strategy)
    assert metric.device.type == ("cpu" if static else "meta")
