"""A ComposerClassifier that reads digits.

Run it with `composer examples/coming_from/composer_before.py`.
"""

from __future__ import annotations

import torch
from composer import Trainer
from composer.algorithms import GradientClipping
from composer.models import ComposerClassifier
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split


def load():
    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32) / 16
    samples = TensorDataset(images, torch.tensor(digits.target))
    generator = torch.Generator().manual_seed(0)
    return random_split(samples, [1397, 400], generator)


def main(output_dir, shuffle=True):
    torch.manual_seed(0)
    layers = nn.Sequential(
        nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)
    )
    model = ComposerClassifier(layers, num_classes=10)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=3e-3, weight_decay=0.0
    )
    train_set, test_set = load()
    train_loader = DataLoader(train_set, 32, shuffle=shuffle)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(
        optimizer, 3 * len(train_loader)
    )
    trainer = Trainer(
        model=model,
        train_dataloader=train_loader,
        eval_dataloader=DataLoader(test_set, 40),
        max_duration="3ep",
        optimizers=optimizer,
        schedulers=schedule,
        step_schedulers_every_batch=True,
        algorithms=[GradientClipping("norm", 1.0)],
        eval_interval="1ep",
        save_folder=output_dir,
        save_interval="1ep",
        save_num_checkpoints_to_keep=2,
        seed=0,
    )
    trainer.fit()
    metrics = trainer.state.eval_metric_values
    return {
        "eval_loss": float(metrics["CrossEntropy"]),
        "eval_accuracy": float(metrics["MulticlassAccuracy"]),
    }


if __name__ == "__main__":
    print(main("runs/before"))
