"""The model that reads digits, with trainer_kit.

Run it with `trainer-kit launch examples/coming_from/composer_after.py`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import Subset, TensorDataset, random_split

from trainer_kit import EvalPrediction, Trainer, TrainingArguments


def load() -> list[Subset[tuple[torch.Tensor, ...]]]:
    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32) / 16
    samples = TensorDataset(images, torch.tensor(digits.target))
    generator = torch.Generator().manual_seed(0)
    return random_split(samples, [1397, 400], generator)


def compute_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    images, labels = batch
    return nn.functional.cross_entropy(model(images), labels)


def accuracy(given: EvalPrediction) -> dict[str, float]:
    right = given.predictions.argmax(-1) == given.label_ids
    return {"accuracy": float(np.mean(right))}


def main(output_dir: str, shuffle: bool = True) -> dict[str, float]:
    torch.manual_seed(0)
    layers = nn.Sequential(
        nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)
    )
    optimizer = torch.optim.AdamW(
        layers.parameters(), lr=3e-3, weight_decay=0.0
    )
    train_set, test_set = load()
    args = TrainingArguments(
        output_dir,
        num_train_epochs=3,
        per_device_train_batch_size=32,
        lr_scheduler_type="cosine",
        max_grad_norm=1.0,
        shuffle=shuffle,
        eval_strategy="epoch",
        save_strategy="epoch",
        save_total_limit=2,
        seed=0,
    )
    trainer = Trainer(
        layers,
        args,
        train_set,
        test_set,
        compute_loss=compute_loss,
        compute_metrics=accuracy,
        optimizer=optimizer,
    )
    trainer.train()
    return trainer.evaluate()


if __name__ == "__main__":
    print(main("runs/after"))
