"""Write your own callback and metric: the callback finds the wrong labels in a training set.

    python examples/custom_callback.py             about 10 seconds on 2 CPU cores
    python examples/custom_callback.py --resume    resumes an interrupted run

Forty of scikit-learn's scanned digits get a wrong label. After each epoch, `LabelCheck` runs the model on the whole
training set and adds up the probability of each label. A model learns the rule long before it memorizes the exceptions,
so the labels with the lowest sums are suspicious. The callback uses what most callbacks need: hooks that get the run,
its own numbers in every record, a request to stop, and a state in every checkpoint, so that a resumed run continues
the sums. The metric `WorstRecall` is computed batch by batch; an evaluation compares with the true labels.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

from trainer_kit import Callback, Run, Trainer, TrainingArguments


class LabelCheck(Callback):
    """Add up, over the epochs, the probability that the model gives to each label.

    Args:
        images: The training images.
        labels: The labels as given, some of them wrong.
        enough: Training stops when the model disagrees with fewer labels than this.
    """

    def __init__(self, images: torch.Tensor, labels: torch.Tensor, enough: int = 20) -> None:
        self.images = images
        self.labels = labels
        self.enough = enough
        self.belief = torch.zeros(len(labels))
        self.disagreements = len(labels)

    def on_epoch_end(self, run: Run) -> None:
        """Run the model on all images; request the end when it has memorized even the wrong labels."""
        run.model.eval()
        with torch.no_grad():
            scores = run.model(run.strategy.to_device(self.images)).cpu()
        run.model.train()
        self.belief += scores.softmax(dim=1)[torch.arange(len(self.labels)), self.labels]
        self.disagreements = int((scores.argmax(dim=1) != self.labels).sum())
        if self.disagreements < self.enough:
            run.requests.stop = True

    def metrics(self, run: Run) -> dict[str, Any]:
        """Return numbers for every record (TensorBoard, the log file)."""
        return {"disagreements": self.disagreements}

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {"belief": self.belief, "disagreements": self.disagreements}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state from a checkpoint."""
        self.belief = state_dict["belief"]
        self.disagreements = state_dict["disagreements"]

    def suspects(self, count: int) -> list[int]:
        """Return the samples whose labels have the lowest sums."""
        indices: list[int] = self.belief.argsort(stable=True)[:count].tolist()
        return indices


class WorstRecall:
    """The smallest share, over the ten digits, of images that are classified correctly."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Begin an evaluation."""
        self.seen, self.right = torch.zeros(10), torch.zeros(10)

    def update(self, scores: torch.Tensor, labels: torch.Tensor) -> None:
        """Count a batch: scores [images, 10], labels [images]."""
        scores, labels = scores.cpu(), labels.cpu()
        self.seen += labels.bincount(minlength=10)
        self.right += labels[scores.argmax(dim=1) == labels].bincount(minlength=10)

    def compute(self) -> float:
        """Return the metric of all batches."""
        return float((self.right / self.seen).min())

    def merge_state(self, others: Iterable[WorstRecall]) -> None:
        """Add what other processes have counted."""
        for other in others:
            self.seen += other.seen
            self.right += other.right


def loss(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    """Return the mean loss of a batch."""
    images, labels = batch
    return nn.functional.cross_entropy(model(images), labels)


def picture(image: torch.Tensor) -> str:
    """Draw an image of 8 x 8 pixels as text."""
    return "\n".join("".join(" .:*#"[int(pixel * 4)] * 2 for pixel in row) for row in image.tolist())


def train(output_dir: str, epochs: int = 12, resume: bool = False) -> dict[str, Any]:
    """Corrupt labels, train, and find them; return the results."""
    digits = load_digits()
    images, truth = torch.tensor(digits.images, dtype=torch.float32) / 16, torch.tensor(digits.target)
    torch.manual_seed(0)
    corrupted = torch.randperm(len(truth))[:40]
    labels = truth.clone()
    labels[corrupted] = (truth[corrupted] + torch.randint(1, 10, (40,))) % 10

    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    args = TrainingArguments(
        output_dir=output_dir,
        num_train_epochs=epochs,
        per_device_train_batch_size=32,
        learning_rate=3e-3,
        logging_strategy="epoch",
        eval_strategy="epoch",
        save_strategy="epoch",
        save_total_limit=2,
    )
    check = LabelCheck(images, labels)
    trainer = Trainer(
        model,
        args,
        TensorDataset(images, labels),
        TensorDataset(images, truth),
        compute_loss=loss,
        metrics={"worst_recall": WorstRecall()},
        callbacks=[check],
    )
    trained = trainer.train(resume_from_checkpoint=resume)

    suspects = check.suspects(40)
    found = set(suspects) & set(corrupted.tolist())
    print(f"\nof the 40 labels with the lowest probability, {len(found)} are among the 40 wrong ones, such as these:")
    for index in suspects[:2]:
        print(f"{picture(images[index])}\n  label {labels[index]}, true digit {truth[index]}")
    print(trained)
    print(f"curves:       tensorboard --logdir {args.log_dir}   (train/disagreements)")
    print(f"checkpoints:  {args.output_dir}/checkpoint-{trained.global_step}")
    return {**trained.metrics, "found": len(found), "belief": check.belief}


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Read the command line and train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output-dir", default="runs/custom_callback", help="checkpoints and logs (%(default)s)")
    parser.add_argument("--resume", action="store_true", help="resume from the newest checkpoint there")
    parser.add_argument("--short", action="store_true", help="3 epochs instead of 12")
    options = parser.parse_args(argv)
    return train(options.output_dir, 3 if options.short else 12, options.resume)


if __name__ == "__main__":
    main()
