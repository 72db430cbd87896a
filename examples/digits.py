"""Reads handwritten digits: a plain PyTorch model, trained on the 1,797 scanned digits that scikit-learn ships.

    python examples/digits.py                  about 10 seconds on 2 CPU cores, 98 to 99 % right
    python examples/digits.py --resume         goes on where a run that was broken off stands

It shows the whole way of a training run: data, a model of your own that returns its loss, evaluation after each epoch,
checkpoints, the best model at the end, and a test on digits that neither training nor the choice of the best has seen.
Needs scikit-learn.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import Subset, TensorDataset, random_split

from trainer_kit import EvalPrediction, Strategy, Trainer, TrainingArguments
from trainer_kit.callbacks.formatting import number


class DigitReader(nn.Module):
    """A small convolutional network for images of 8 x 8 pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Dropout(0.3),
            nn.Linear(32 * 4 * 4, 10),
        )

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The mean loss, and the scores of the ten digits: [images, 10]."""
        scores = self.layers(images)
        return nn.functional.cross_entropy(scores, labels), scores


def load_data() -> list[Subset[tuple[torch.Tensor, ...]]]:
    """Images and digits to train on, to choose the best model by, and to test it with; the same split every time."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    samples = TensorDataset(images, torch.tensor(digits.target))
    return random_split(samples, [1197, 200, 400], torch.Generator().manual_seed(0))


def accuracy(prediction: EvalPrediction) -> dict[str, float]:
    """The share of digits read right."""
    return {"accuracy": float(np.mean(prediction.predictions.argmax(axis=1) == prediction.label_ids))}


def main(argv: Sequence[str] | None = None, strategy: Strategy | None = None) -> dict[str, float]:
    """Trains, tests and prints the figures; returns the test's metrics and the training's."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output-dir", default="runs/digits", help="checkpoints and logs (%(default)s)")
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint there")
    parser.add_argument("--short", action="store_true", help="2 epochs, to see that all works")
    options = parser.parse_args(argv)

    torch.manual_seed(0)  # the Trainer seeds all that is random in training; the model is made before it
    train_set, validation_set, test_set = load_data()
    args = TrainingArguments(
        output_dir=options.output_dir,
        num_train_epochs=2 if options.short else 12,
        per_device_train_batch_size=32,
        learning_rate=3e-3,
        lr_scheduler_type="cosine",
        warmup_ratio=0.1,
        weight_decay=0.01,
        logging_steps=20,
        eval_strategy="epoch",
        save_strategy="epoch",
        save_total_limit=2,
        load_best_model_at_end=True,
        metric_for_best_model="accuracy",
    )
    model = DigitReader()
    trainer = Trainer(model, args, train_set, validation_set, compute_metrics=accuracy, strategy=strategy)
    trained = trainer.train(resume_from_checkpoint=options.resume)
    tested = trainer.predict(test_set)

    figures = trained.metrics
    print(f"\n{tested.metrics['test_accuracy']:.2%} of {len(test_set)} digits that it had never seen are read right")
    print(
        f"{trained.global_step} steps in {figures['train_runtime']:.1f} s, "
        f"{figures['train_samples_per_second']:,.0f} samples/s, "
        f"peak memory in GiB: {number(figures['peak_memory_gib'])}"
    )
    print(f"curves:       tensorboard --logdir {args.log_dir}")
    print(f"checkpoints:  {args.output_dir}, the best is checkpoint-{trainer.run.state.best_step}")
    print(f"go on after a break: python examples/digits.py --output-dir {args.output_dir} --resume")
    return {**figures, **tested.metrics}


if __name__ == "__main__":
    main()
