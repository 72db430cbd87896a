"""The model that reads digits, with trainer_kit.

Run it with `python examples/coming_from/lightning_after.py`.
"""

from __future__ import annotations

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import Subset, TensorDataset, random_split

from trainer_kit import EvalPrediction, Trainer, TrainingArguments


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)
        )

    def forward(
        self, images: torch.Tensor, labels: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        scores = self.layers(images)
        return nn.functional.cross_entropy(scores, labels), scores


def accuracy(given: EvalPrediction) -> dict[str, float]:
    right = given.predictions.argmax(-1) == given.label_ids
    return {"accuracy": float(np.mean(right))}


def load() -> list[Subset[tuple[torch.Tensor, ...]]]:
    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32) / 16
    samples = TensorDataset(images, torch.tensor(digits.target))
    generator = torch.Generator().manual_seed(0)
    return random_split(samples, [1397, 400], generator)


def main(output_dir: str, shuffle: bool = True) -> dict[str, float]:
    torch.manual_seed(0)
    model = Reader()
    train_set, test_set = load()
    args = TrainingArguments(
        output_dir,
        num_train_epochs=3,
        per_device_train_batch_size=32,
        learning_rate=3e-3,
        lr_scheduler_type="cosine",
        max_grad_norm=1.0,
        shuffle=shuffle,
        eval_strategy="epoch",
        save_strategy="epoch",
        save_total_limit=1,
        save_best_limit=2,
        metric_for_best_model="accuracy",
    )
    trainer = Trainer(
        model, args, train_set, test_set, compute_metrics=accuracy
    )
    trainer.train()
    return trainer.evaluate()


if __name__ == "__main__":
    print(main("runs/after"))
