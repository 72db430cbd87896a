"""Evaluations and predictions of a Trainer."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kit.datasets import points
from kit.models import Linear
from kit.trainer import arguments
from scenarios.task import Net, Noisy

from trainer_kit import (
    EvalPrediction,
    Trainer,
)
from trainer_kit.utils.rng import seed_generators


def test_predict_gives_every_sample_once_in_order(tmp_path: Path) -> None:
    model = Net()
    trainer = Trainer(model, arguments(tmp_path, per_device_eval_batch_size=3))
    dataset = Noisy(10)
    output = trainer.predict(dataset)
    assert np.array_equal(output.label_ids, dataset.labels.numpy())
    assert output.predictions.shape == (10, 3)
    again = Trainer(model, arguments(tmp_path, per_device_eval_batch_size=7)).predict(dataset)
    np.testing.assert_allclose(again.predictions, output.predictions, atol=1e-6)
    assert output.metrics["test_loss"] == pytest.approx(again.metrics["test_loss"], abs=1e-6)


def test_compute_metrics_and_streaming_metrics_agree(tmp_path: Path) -> None:
    from torchmetrics.classification import MulticlassAccuracy

    def compute_metrics(prediction: EvalPrediction) -> dict[str, float]:
        return {"whole": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}

    metrics = {"streamed": MulticlassAccuracy(3, average="micro")}
    trainer = Trainer(
        Net(), arguments(tmp_path), eval_dataset=Noisy(10), compute_metrics=compute_metrics, metrics=metrics
    )
    for _ in range(2):
        result = trainer.evaluate()
        assert result["eval_streamed"] == pytest.approx(result["eval_whole"])


def test_several_evaluation_sets_by_name(tmp_path: Path) -> None:
    trainer = Trainer(Linear(), arguments(tmp_path), eval_dataset={"near": points(4), "far": points(5)})
    assert {"eval_near_loss", "eval_far_loss"} <= set(trainer.evaluate())


def test_modules_that_a_user_keeps_in_evaluation_mode_stay_so(tmp_path: Path) -> None:
    model = Net()
    trainer = Trainer(model, arguments(tmp_path), eval_dataset=Noisy(5))
    model.norm.eval()
    trainer.evaluate()
    assert not model.norm.training
    assert model.dropout.training


def test_predictions_leave_out_what_a_model_did_not_give(tmp_path: Path) -> None:
    class WithNothing(Linear):
        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Any:
            return super().forward(x, labels), self.layer(x), None

    seen = []
    trainer = Trainer(
        WithNothing(), arguments(tmp_path), compute_metrics=lambda each: seen.append(each.predictions.shape) or {}
    )
    trainer.evaluate(points(5))
    assert seen == [(5, 3)]


def test_evaluating_leaves_the_generators_alone(tmp_path: Path) -> None:
    def draws() -> tuple[float, float, float]:
        return float(torch.rand(())), float(np.random.random_sample()), random.random()

    trainer = Trainer(Linear(), arguments(tmp_path), eval_dataset=points())
    seed_generators(3)
    expected = draws()
    seed_generators(3)
    trainer.evaluate()
    assert draws() == expected
