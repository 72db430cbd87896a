"""A loss of your own: class weights and label smoothing, right for every batch size and accumulation.

    python examples/custom_loss.py                 about 10 seconds on 2 CPU cores

Of scikit-learn's scanned digits, eights and nines are made rare; a loss with class weights makes up for that. Torch's
weighted mean divides by the weights of the batch at hand, so that a mean of such means depends on how the samples are
cut into batches. `WeightedLoss` returns `(loss_sum, count)` instead: the Trainer divides the sum over all batches of a
step by the count over all of them. The table shows the same 64 samples per step, cut in three ways, with either loss.
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
"""Batch size and gradient accumulation: always 64 samples per step."""


class WeightedLoss:
    """Cross entropy with class weights and label smoothing, as a sum and what to divide it by.

    Args:
        weights: A weight for each class.
        smoothing: Share of the target that goes to all classes evenly.
    """

    def __init__(self, weights: torch.Tensor, smoothing: float = 0.05) -> None:
        self.weights = weights
        self.smoothing = smoothing

    def __call__(self, model: nn.Module, batch: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """The loss of one batch: `(loss_sum, count)`, both scalars."""
        images, labels = batch
        weights = self.weights.to(images)
        loss_sum = nn.functional.cross_entropy(
            model(images), labels, weights, label_smoothing=self.smoothing, reduction="sum"
        )
        return loss_sum, weights[labels].sum()


class MeanOfMeans(WeightedLoss):
    """The same loss as a mean over each batch, which is what one would write first."""

    def __call__(self, model: nn.Module, batch: list[torch.Tensor]) -> Any:
        """The loss of one batch: a scalar."""
        loss_sum, count = super().__call__(model, batch)
        return loss_sum / count


def load_data() -> tuple[TensorDataset, TensorDataset, torch.Tensor]:
    """Digits to train on, with only one in ten of the eights and nines; the others; the classes' weights."""
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
    """The share of eights and nines that are read as such."""
    right = prediction.predictions.argmax(axis=1) == prediction.label_ids
    return {"rare_recall": float(np.mean(right[prediction.label_ids >= 8]))}


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Trains with each loss and layout and prints the table; returns its figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output-dir", default="runs/custom_loss", help="a folder for each training (%(default)s)")
    parser.add_argument("--short", action="store_true", help="1 epoch instead of 6")
    options = parser.parse_args(argv)
    train_set, held_out, weights = load_data()

    def train(name: str, loss: Callable[[nn.Module, Any], Any], batch: int, accumulation: int) -> tuple[Any, Any]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)).double()
        args = TrainingArguments(
            output_dir=str(Path(options.output_dir) / f"{name}-{batch}x{accumulation}"),
            num_train_epochs=1 if options.short else 6,
            per_device_train_batch_size=batch,
            gradient_accumulation_steps=accumulation,
            learning_rate=1e-2,
            save_strategy="no",
            use_cpu=True,  # not every accelerator has float64
        )
        trainer = Trainer(model, args, train_set, held_out, compute_loss=loss, compute_metrics=recall)
        trainer.train()
        return nn.utils.parameters_to_vector(model.parameters()).detach(), trainer.evaluate()

    _, unweighted = train("unweighted", WeightedLoss(torch.ones(10)), *LAYOUTS[0])
    pairs = [train("pair", WeightedLoss(weights), *layout) for layout in LAYOUTS]
    means = [train("mean", MeanOfMeans(weights), *layout) for layout in LAYOUTS]
    differences = [
        (float((pair - pairs[0][0]).abs().max()), float((mean - pairs[0][0]).abs().max()))
        for (pair, _), (mean, _) in zip(pairs, means, strict=True)
    ]
    recalls = [metrics["eval_rare_recall"] for metrics in (pairs[0][1], unweighted)]

    print("\nhow far the weights end up from those of 64 x 1")
    print(f"{'batch x accumulation':>22}{'(loss_sum, count)':>20}{'mean of means':>16}")
    for (batch, accumulation), (pair, mean) in zip(LAYOUTS, differences, strict=True):
        print(f"{f'{batch} x {accumulation}':>22}{pair:>20.1e}{mean:>16.1e}")
    print(f"eights and nines read right: {recalls[0]:.1%}, without class weights {recalls[1]:.1%}")
    print(f"curves:       tensorboard --logdir {options.output_dir}")
    return {"differences": differences, "recalls": recalls, "losses": [metrics["eval_loss"] for _, metrics in pairs]}


if __name__ == "__main__":
    main()
