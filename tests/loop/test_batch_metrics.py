"""Metrics batch by batch, and predictions that are not joined: `compute_result` and `eval_do_concat_batches`."""

from __future__ import annotations

import functools
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kit.ranks import on_ranks
from kit.trainer import UNUSED
from torch import nn
from torch.nn import functional as F  # noqa: N812

from trainer_kit import EvalPrediction, Trainer, TrainingArguments
from trainer_kit.errors import EvaluationInterrupted
from trainer_kit.loop.batch_metrics import BatchMetrics
from trainer_kit.loop.collected import Collected


class Detector(nn.Module):
    """Returns boxes, as many as a batch has samples."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.layer(x)
        boxes = logits[:, None, :1].expand(-1, len(x), -1)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits, "boxes": boxes}


def samples(length: int = 11) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [{"x": torch.randn(3, generator=generator), "labels": torch.tensor(each % 2)} for each in range(length)]


class Accuracy:
    """Counts batch by batch, as in transformers' examples; keeps what it was called with."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, bool]] = []
        self.right: list[bool] = []

    def __call__(self, batch: EvalPrediction, compute_result: bool = False) -> dict[str, float]:
        predictions, labels = batch
        self.calls.append((len(labels), compute_result))
        self.right += (predictions.argmax(dim=-1) == labels).tolist()  # by tensors alone
        if not compute_result:
            return {}
        found = {"accuracy": sum(self.right) / len(self.right), "counted": len(self.right)}
        self.right = []
        return found


def accuracy(prediction: EvalPrediction) -> dict[str, float]:
    return {"accuracy": (prediction.predictions.argmax(-1) == prediction.label_ids).mean()}


def make_trainer(path: Any, compute_metrics: Any, model: nn.Module | None = None, **given: Any) -> Trainer:
    functions = {name: given.pop(name) for name in ("preprocess_logits_for_metrics", "data_collator") if name in given}
    options = {"use_cpu": True, "report_to": "none", "disable_tqdm": True, "log_level": "error"}
    args = TrainingArguments(str(path), **{**options, "per_device_eval_batch_size": 4, **given})
    return Trainer(model or Detector(), args, compute_metrics=compute_metrics, **functions)


def by_batch(path: Any, compute_metrics: Any, model: nn.Module | None = None, **given: Any) -> Trainer:
    return make_trainer(path, compute_metrics, model, batch_eval_metrics=True, **given)


def test_the_function_must_have_the_argument(tmp_path: Path) -> None:
    counts = Accuracy()
    for function in (counts, counts.__call__, functools.partial(counts)):
        BatchMetrics(function)
    trainer = make_trainer(tmp_path, accuracy, batch_eval_metrics=True)
    with pytest.raises(ValueError, match=r"^batch_eval_metrics=True needs a compute_metrics with an argument"):
        trainer.evaluate(samples())


def test_a_function_with_the_argument_gets_the_dataset_by_default(tmp_path: Path) -> None:
    def whole(prediction: EvalPrediction, compute_result: bool = True) -> dict[str, float]:
        assert compute_result
        return accuracy(prediction) | {"counted": len(prediction.label_ids)}

    assert make_trainer(tmp_path, whole).evaluate(samples())["eval_counted"] == 11


def test_what_tensors_cannot_hold_comes_as_it_is(tmp_path: Path) -> None:
    seen: list[EvalPrediction] = []

    def keep(batch: EvalPrediction, compute_result: bool) -> dict[str, float]:
        seen.append(batch)
        return {}

    def texts_and_places(logits: Any, labels: Any) -> Any:
        return np.array(["a"] * len(labels)), logits.numpy().argsort(-1)[:, ::-1]

    by_batch(tmp_path, keep, preprocess_logits_for_metrics=texts_and_places).evaluate(samples(3))
    texts, places = seen[0].predictions
    assert (texts.tolist(), places.shape) == (["a", "a", "a"], (3, 2))


def test_batches_come_as_tensors_and_the_last_one_with_compute_result(tmp_path: Path) -> None:
    counts = Accuracy()
    expected = make_trainer(tmp_path, accuracy).evaluate(samples())["eval_accuracy"]
    trainer = by_batch(tmp_path, counts)
    for _ in range(2):  # it begins again
        found = trainer.evaluate(samples())
        assert (found["eval_accuracy"], found["eval_counted"]) == (expected, 11)
        assert counts.calls == [(4, False), (4, False), (3, True)]
        counts.calls.clear()


def test_predict_calls_it_too_and_returns_all(tmp_path: Path) -> None:
    counts = Accuracy()
    output = by_batch(tmp_path, counts).predict(samples())
    assert output.metrics["test_counted"] == len(output.predictions) == len(output.label_ids) == 11
    assert [is_last for _, is_last in counts.calls] == [False, False, True]


def test_only_one_batch_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[int] = []
    add = Collected.add
    monkeypatch.setattr(Collected, "add", lambda self, *given: (add(self, *given), kept.append(len(self.blocks))))
    by_batch(tmp_path, Accuracy()).evaluate(samples(40))
    assert kept == [1] * 10
    kept.clear()
    by_batch(tmp_path, Accuracy(), auto_find_batch_size=True).evaluate(samples(40))
    assert kept == [*range(1, 11)]  # an evaluation that begins again has passed on nothing


SAID = "the evaluation ended early, and compute_metrics(..., compute_result=) keeps the batches that it got"


class Fails(Detector):
    """Its third batch, of three samples, fails."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        if len(x) == 3:
            raise KeyboardInterrupt
        return super().forward(x, labels)


class Picky(Accuracy):
    """Fails with the last batch."""

    def __call__(self, batch: EvalPrediction, compute_result: bool = False) -> dict[str, float]:
        if compute_result:
            raise KeyboardInterrupt
        return super().__call__(batch)


@pytest.mark.parametrize("method", ["evaluate", "predict"])
def test_an_evaluation_that_ended_early_is_mentioned(
    method: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def run(counts: Accuracy, length: int, model: nn.Module | None = None) -> None:
        getattr(by_batch(tmp_path, counts, model, log_level="warning"), method)(samples(length))

    with pytest.raises(KeyboardInterrupt):
        run(Accuracy(), 3, Fails())
    run(Accuracy(), 8, Fails())
    assert SAID not in caplog.text, "it got none, or all"
    with pytest.raises(KeyboardInterrupt):
        run(Accuracy(), 11, Fails())
    assert (SAID in caplog.text) == (method == "evaluate"), "it got two; predict keeps all until the end"
    caplog.clear()
    with pytest.raises(KeyboardInterrupt):
        run(Picky(), 11)
    assert SAID in caplog.text


def test_a_signal_in_an_evaluation_is_mentioned(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Told(Detector):
        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            if len(x) == 3:
                trainer.run.requests.exit_code = 143
            return super().forward(x, labels)

    trainer = by_batch(tmp_path, Accuracy(), Told(), log_level="warning")
    with pytest.raises(EvaluationInterrupted):
        trainer.evaluate(samples())
    assert SAID in caplog.text


@pytest.mark.parametrize("given", [{"batch_eval_metrics": True}, {"eval_do_concat_batches": False}], ids=str)
def test_the_function_may_change_what_it_gets(given: dict[str, Any], tmp_path: Path) -> None:
    def changes(prediction: EvalPrediction, compute_result: bool = True) -> dict[str, float]:
        for labels in prediction.label_ids if isinstance(prediction.label_ids, list) else [prediction.label_ids]:
            labels[:] = 0
        return {}

    rows = samples(2)
    batches = [{name: torch.stack([row[name] for row in rows]) for name in rows[0]}] * 2
    trainer = make_trainer(
        tmp_path, changes, data_collator=lambda batch: batch[0], per_device_eval_batch_size=1, **given
    )
    trainer.evaluate(batches)
    assert batches[0]["labels"].tolist() == [0, 1], "on the CPU, a batch may be the dataset's own tensors"


def test_batches_that_are_not_joined_are_lists(tmp_path: Path) -> None:
    seen: list[EvalPrediction] = []

    def keep(prediction: EvalPrediction) -> dict[str, float]:
        seen.append(prediction)
        return {}

    options = {"eval_do_concat_batches": False, "include_for_metrics": ["inputs", "loss"]}
    trainer = make_trainer(tmp_path, keep, **options)
    trainer.evaluate(samples())
    output = trainer.predict(samples())
    (first, second), inputs = seen, torch.stack([sample["x"] for sample in samples()])
    for found in (first, second, output):
        assert [len(labels) for labels in found.label_ids] == [4, 4, 3]
        assert np.concatenate(found.label_ids).tolist() == [each % 2 for each in range(11)]
        for batch in found.predictions:
            assert isinstance(batch, np.ndarray)
    assert np.concatenate(first.inputs).tolist() == inputs.tolist()
    assert [len(losses) for losses in first.losses] == [4, 4, 3]


def test_without_labels_there_is_no_list_of_them() -> None:
    collected = Collected(joins=False)
    assert collected.prediction().predictions is None
    collected = Collected(joins=False)
    for _ in range(2):
        collected.add(torch.zeros(2), None)
    assert not collected.has_labels
    assert collected.prediction().label_ids is None
    assert len(collected.prediction().predictions) == 2


def test_structures_that_differ_are_refused_with_a_way_out(tmp_path: Path) -> None:
    def outputs(logits: Any, labels: torch.Tensor) -> Any:
        return logits if len(labels) == 4 else (logits, labels)

    trainer = make_trainer(tmp_path, accuracy, preprocess_logits_for_metrics=outputs)
    with pytest.raises(ValueError, match="predictions of different batches are a tensor of 2 dimensions and 2 val"):
        trainer.evaluate(samples())
    trainer = make_trainer(tmp_path, None, eval_do_concat_batches=False, preprocess_logits_for_metrics=outputs)
    last = trainer.predict(samples()).predictions[-1]
    assert (type(last), len(last)) == (tuple, 2)


def results_on_ranks() -> dict[str, Any]:
    counts = Accuracy()
    warnings.simplefilter("error")
    found = by_batch(UNUSED, counts).evaluate(samples())
    apart = make_trainer(UNUSED, None, eval_do_concat_batches=False).predict(samples())
    return {
        "accuracy": found["eval_accuracy"], "counted": found["eval_counted"], "calls": counts.calls,
        "predictions": [batch.tolist() for batch in apart.predictions],
    }  # fmt: skip


@pytest.mark.distributed
def test_on_processes_the_main_one_gets_all_batches_in_order() -> None:
    expected = results_on_ranks()
    main, other = on_ranks(2, results_on_ranks)
    assert main == expected
    assert other == expected | {"calls": []}
