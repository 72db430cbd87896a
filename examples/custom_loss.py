"""Write your own loss: class weights and label smoothing, correct for every batch size and accumulation.

    python examples/custom_loss.py                 about 10 seconds on 2 CPU cores

Of scikit-learn's scanned digits, eights and nines are made rare; a loss with class weights compensates for that.
PyTorch's weighted mean divides by the weights of the current batch, so a mean of such means depends on how the samples
are divided into batches. `WeightedLoss` returns `(loss_sum, count)` instead: the Trainer divides the sum over all
batches of a step by the count over all of them. The table compares both losses for the same 64 samples a step, divided
in three ways.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

from trainer_kit import EvalPrediction, Trainer, TrainingArguments

LAYOUTS = [(64, 1), (16, 4), (4, 16)]
"""Batch size and gradient accumulation: always 64 samples a step."""


class WeightedLoss:
    """Cross entropy with class weights and label smoothing, as a sum and its divisor.

    Args:
        weights: A weight for each class.
        smoothing: Share of the target that goes to all classes evenly.
    """

    def __init__(self, weights: torch.Tensor, smoothing: float = 0.05) -> None:
        self.weights = weights
        self.smoothing = smoothing

    def __call__(self, model: nn.Module, batch: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the loss of a batch: `(loss_sum, count)`, both scalars."""
        images, labels = batch
        weights = self.weights.to(images)
        loss_sum = nn.functional.cross_entropy(
            model(images), labels, weights, label_smoothing=self.smoothing, reduction="sum"
        )
        return loss_sum, weights[labels].sum()


class MeanOfMeans(WeightedLoss):
    """The same loss as a mean over each batch, the obvious but inexact way."""

    def __call__(self, model: nn.Module, batch: list[torch.Tensor]) -> Any:
        """Return the loss of a batch: a scalar."""
        loss_sum, count = super().__call__(model, batch)
        return loss_sum / count


def load_data() -> tuple[TensorDataset, TensorDataset, torch.Tensor]:
    """Return a training set with one in ten of the eights and nines, a held-out set, and the class weights."""
    digits = load_digits()
    images, labels = torch.tensor(digits.images) / 16, torch.tensor(digits.target)
    shuffled = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, held_out = shuffled[:1200], shuffled[1200:]
    rare = labels[train] >= 8
    train = torch.cat([train[~rare], train[rare][::10]])
    counts = labels[train].bincount()
    weights = counts.sum() / (10 * counts)
    return TensorDataset(images[train], labels[train]), TensorDataset(images[held_out], labels[held_out]), weights


def recall(prediction: EvalPrediction) -> dict[str, float]:
    """Return the share of eights and nines that are classified correctly."""
    right = prediction.predictions.argmax(axis=1) == prediction.label_ids
    return {"rare_recall": float(np.mean(right[prediction.label_ids >= 8]))}


def train(
    folder: Path, loss: Callable[[nn.Module, Any], Any], batch_size: int, accumulation: int, epochs: int
) -> tuple[torch.Tensor, dict[str, Any]]:
    """Train with one loss and layout; return the final parameters and the metrics of the evaluation."""
    torch.manual_seed(0)
    train_set, held_out, _ = load_data()
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)).double()
    args = TrainingArguments(
        output_dir=str(folder),
        num_train_epochs=epochs,
        per_device_train_batch_size=batch_size,
        gradient_accumulation_steps=accumulation,
        learning_rate=1e-2,
        save_strategy="no",
        use_cpu=True,  # not every accelerator has float64
    )
    trainer = Trainer(model, args, train_set, held_out, compute_loss=loss, compute_metrics=recall)
    trainer.train()
    return nn.utils.parameters_to_vector(model.parameters()).detach(), trainer.evaluate()


def compare(output_dir: Path, epochs: int) -> dict[str, Any]:
    """Train with each loss and layout and print the table; return its figures."""
    *_, weights = load_data()

    def run(name: str, loss: WeightedLoss, batch_size: int, accumulation: int) -> tuple[torch.Tensor, dict[str, Any]]:
        return train(output_dir / f"{name}-{batch_size}x{accumulation}", loss, batch_size, accumulation, epochs)

    _, unweighted = run("unweighted", WeightedLoss(torch.ones(10)), *LAYOUTS[0])
    pairs = [run("pair", WeightedLoss(weights), *layout) for layout in LAYOUTS]
    means = [run("mean", MeanOfMeans(weights), *layout) for layout in LAYOUTS]
    differences = [
        (float((pair - pairs[0][0]).abs().max()), float((mean - pairs[0][0]).abs().max()))
        for (pair, _), (mean, _) in zip(pairs, means, strict=True)
    ]
    recalls = [metrics["eval_rare_recall"] for metrics in (pairs[0][1], unweighted)]

    print("\nlargest difference of the trained weights from those of 64 x 1")
    print(f"{'batch x accumulation':>22}{'(loss_sum, count)':>20}{'mean of means':>16}")
    for (batch, accumulation), (pair, mean) in zip(LAYOUTS, differences, strict=True):
        print(f"{f'{batch} x {accumulation}':>22}{pair:>20.1e}{mean:>16.1e}")
    print(f"recall of eights and nines: {recalls[0]:.1%} with class weights, {recalls[1]:.1%} without")
    print(f"curves:       tensorboard --logdir {output_dir}")
    return {"differences": differences, "recalls": recalls, "losses": [metrics["eval_loss"] for _, metrics in pairs]}


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Read the command line and compare the losses."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output-dir", default="runs/custom_loss", help="a folder for each training (%(default)s)")
    parser.add_argument("--short", action="store_true", help="1 epoch instead of 6")
    options = parser.parse_args(argv)
    return compare(Path(options.output_dir), 1 if options.short else 6)


if __name__ == "__main__":
    main()
