"""Evaluated and predicted under XLA: each sample once, in order, with the metrics of a CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kit import xla_task
from kit.on_xla import on_cpu, on_xla

from trainer_kit import EvalPrediction

pytestmark = pytest.mark.xla

SAMPLES = 21  # two batches of 8 and one of 5


class Accuracy:
    """A streaming metric."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.right, self.seen = 0, 0

    def update(self, predictions: torch.Tensor, labels: torch.Tensor) -> None:
        right = (predictions.argmax(-1) == labels) & (labels != -100)
        self.right += int(right.sum())
        self.seen += int((labels != -100).sum())

    def compute(self) -> dict[str, float]:
        return {"accuracy": self.right / self.seen, "seen": self.seen}


def collected(prediction: EvalPrediction) -> dict[str, float]:
    counted = prediction.label_ids != -100
    return {"rows": len(prediction.predictions), "logits": float(np.abs(prediction.predictions[counted]).mean())}


def evaluate(folder: Path, *strategies: str) -> dict[tuple[str, str], Any]:
    """Evaluates each task, with labels and without."""
    found = {}
    for task, (_, make_dataset) in xla_task.TASKS.items():
        for name in strategies:
            trainer = xla_task.make_trainer(
                folder / task / name, task, xla_task.strategy(name),
                trainer={"metrics": Accuracy(), "compute_metrics": collected},
            )  # fmt: skip
            dataset = make_dataset(SAMPLES)
            unlabelled = [
                {key: row[key] for key in row if key != "labels"} for row in map(dataset.__getitem__, range(SAMPLES))
            ]
            metrics = {name: value for name, value in trainer.evaluate().items() if "second" not in name}
            del metrics["eval_runtime"]
            found[task, name] = metrics, trainer.predict(dataset)[:2], trainer.predict(unlabelled).predictions
    return found


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Any]:
    return on_cpu(evaluate, tmp_path_factory.mktemp("cpu"), "cpu")


@pytest.mark.parametrize("devices", [1, 4])
def test_each_sample_is_seen_once_in_order(tmp_path: Path, expected: Any, devices: int) -> None:
    found = on_xla(devices, evaluate, tmp_path, *(["xla", "fsdp"] if devices == 4 else ["xla"]))
    for (task, strategy), (metrics, (predictions, labels), unlabelled) in found.items():
        case = f"{task}, {strategy}"
        its_metrics, (its_predictions, its_labels), its_unlabelled = expected[task, "cpu"]
        assert metrics == pytest.approx(its_metrics, abs=1e-5), case
        assert {"eval_loss", "eval_accuracy", "eval_seen", "eval_rows", "eval_logits"} == metrics.keys(), case
        # By token, XLA's rows are longer: its batches are.
        assert len(labels) == len(its_labels) == SAMPLES, case
        counted, its_counted = labels != -100, its_labels != -100
        np.testing.assert_array_equal(labels[counted], its_labels[its_counted], case)
        np.testing.assert_allclose(predictions[counted], its_predictions[its_counted], rtol=0, atol=1e-5, err_msg=case)
        length = its_unlabelled.shape[1]
        real = its_unlabelled[..., 0] != -100 if task == "gpt2" else np.ones(SAMPLES, bool)
        own = unlabelled[:, :length] if task == "gpt2" else unlabelled
        np.testing.assert_allclose(own[real], its_unlabelled[real], rtol=0, atol=1e-5, err_msg=case)
