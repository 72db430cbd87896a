"""The model that reads digits, with trainer_kit.

Run it with `python examples/coming_from/keras_after.py`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

from trainer_kit import EvalPrediction, Trainer, TrainingArguments


def compute_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    images, labels = batch
    return nn.functional.cross_entropy(model(images), labels)


def accuracy(given: EvalPrediction) -> dict[str, float]:
    right = given.predictions.argmax(-1) == given.label_ids
    return {"accuracy": float(np.mean(right))}


def main(output_dir: str, shuffle: bool = True) -> dict[str, float]:
    torch.manual_seed(0)
    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32) / 16
    labels = torch.tensor(digits.target)
    model = nn.Sequential(
        nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)
    )
    args = TrainingArguments(
        output_dir,
        num_train_epochs=3,
        per_device_train_batch_size=32,
        learning_rate=3e-3,
        adam_epsilon=1e-7,
        lr_scheduler_type="constant",
        max_grad_norm=1.0,
        shuffle=shuffle,
        eval_strategy="epoch",
        save_strategy="best",
        metric_for_best_model="accuracy",
    )
    trainer = Trainer(
        model,
        args,
        TensorDataset(images[:1397], labels[:1397]),
        TensorDataset(images[1397:], labels[1397:]),
        compute_loss=compute_loss,
        compute_metrics=accuracy,
    )
    trainer.train()
    return trainer.evaluate()


if __name__ == "__main__":
    print(main("runs/after"))
