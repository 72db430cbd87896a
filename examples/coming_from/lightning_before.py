"""A LightningModule that reads digits.

Run it with `python examples/coming_from/lightning_before.py`.
"""

from __future__ import annotations

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split


class Reader(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)
        )

    def training_step(self, batch, index):
        images, labels = batch
        return nn.functional.cross_entropy(self.layers(images), labels)

    def validation_step(self, batch, index):
        images, labels = batch
        scores = self.layers(images)
        loss = nn.functional.cross_entropy(scores, labels)
        right = (scores.argmax(-1) == labels).float().mean()
        self.log_dict({"val_loss": loss, "val_accuracy": right})

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(
            self.parameters(), lr=3e-3, weight_decay=0.0
        )
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(
            optimizer, self.trainer.estimated_stepping_batches
        )
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step"},
        }


def load():
    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32) / 16
    samples = TensorDataset(images, torch.tensor(digits.target))
    generator = torch.Generator().manual_seed(0)
    return random_split(samples, [1397, 400], generator)


def main(output_dir, shuffle=True):
    L.seed_everything(0)
    model = Reader()
    train_set, test_set = load()
    trainer = L.Trainer(
        max_epochs=3,
        gradient_clip_val=1.0,
        default_root_dir=output_dir,
        callbacks=[
            ModelCheckpoint(
                monitor="val_accuracy", mode="max", save_top_k=2
            )
        ],
    )
    test_loader = DataLoader(test_set, batch_size=32)
    trainer.fit(
        model,
        DataLoader(train_set, batch_size=32, shuffle=shuffle),
        test_loader,
    )
    [metrics] = trainer.validate(model, test_loader)
    return {
        "eval_loss": metrics["val_loss"],
        "eval_accuracy": metrics["val_accuracy"],
    }


if __name__ == "__main__":
    print(main("runs/before"))
