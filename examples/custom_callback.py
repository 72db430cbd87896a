"""A callback of your own: finds the wrong labels in a training set.

    python examples/custom_callback.py             about 10 seconds on 2 CPU cores
    python examples/custom_callback.py --resume    goes on where a run that was broken off stands

Forty of scikit-learn's scanned digits get a wrong label. `LabelCheck` reads the whole training set after each epoch and
adds up the probability that the model gives to each label. A model learns what is right long before it learns the
exceptions by heart, so the labels that were believed least are those to look at. The callback has the four things that
most callbacks need: hooks that get the run, numbers of its own in every record, a request to the loop, and a state
that lies in every checkpoint, so that a resumed run goes on adding.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

from trainer_kit import Callback, Run, Trainer, TrainingArguments


class LabelCheck(Callback):
    """Adds up, epoch by epoch, how much the model believes each label.

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
        """Reads all images; asks the loop to stop when the model has learned even the wrong labels by heart."""
        run.model.eval()
        with torch.no_grad():
            scores = run.model(run.strategy.to_device(self.images)).cpu()
        run.model.train()
        self.belief += scores.softmax(dim=1)[torch.arange(len(self.labels)), self.labels]
        self.disagreements = int((scores.argmax(dim=1) != self.labels).sum())
        if self.disagreements < self.enough:
            run.requests.stop = True

    def metrics(self, run: Run) -> dict[str, Any]:
        """Goes into every record, to TensorBoard and the log file."""
        return {"disagreements": self.disagreements}

    def state_dict(self) -> dict[str, Any]:
        """Goes into every checkpoint."""
        return {"belief": self.belief, "disagreements": self.disagreements}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Comes out of the checkpoint that a run goes on from."""
        self.belief = state_dict["belief"]
        self.disagreements = state_dict["disagreements"]

    def suspects(self, count: int) -> list[int]:
        """The samples whose labels were believed least."""
        indices: list[int] = self.belief.argsort(stable=True)[:count].tolist()
        return indices


def loss(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    """The mean loss of a batch."""
    images, labels = batch
    return nn.functional.cross_entropy(model(images), labels)


def picture(image: torch.Tensor) -> str:
    """An image of 8 x 8 pixels as text."""
    return "\n".join("".join(" .:*#"[int(pixel * 4)] * 2 for pixel in row) for row in image.tolist())


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Spoils labels, trains, finds them; returns what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output-dir", default="runs/custom_callback", help="checkpoints and logs (%(default)s)")
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint there")
    parser.add_argument("--short", action="store_true", help="3 epochs instead of 12")
    options = parser.parse_args(argv)

    digits = load_digits()
    images, truth = torch.tensor(digits.images, dtype=torch.float32) / 16, torch.tensor(digits.target)
    torch.manual_seed(0)
    spoiled = torch.randperm(len(truth))[:40]
    labels = truth.clone()
    labels[spoiled] = (truth[spoiled] + torch.randint(1, 10, (40,))) % 10

    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    args = TrainingArguments(
        output_dir=options.output_dir,
        num_train_epochs=3 if options.short else 12,
        per_device_train_batch_size=32,
        learning_rate=3e-3,
        logging_strategy="epoch",
        save_strategy="epoch",
        save_total_limit=2,
    )
    check = LabelCheck(images, labels)
    trainer = Trainer(model, args, TensorDataset(images, labels), compute_loss=loss, callbacks=[check])
    trained = trainer.train(resume_from_checkpoint=options.resume)

    suspects = check.suspects(40)
    found = set(suspects) & set(spoiled.tolist())
    print(f"\n{len(found)} of the 40 wrong labels are among the 40 whose labels the model believed least. Among them:")
    for index in suspects[:2]:
        print(f"{picture(images[index])}\n  labelled {labels[index]}, truly {truth[index]}")
    print(f"{trained.global_step} steps in {trained.metrics['train_runtime']:.1f} s")
    print(f"curves:       tensorboard --logdir {args.log_dir}   (train/disagreements)")
    print(f"checkpoints:  {args.output_dir}/checkpoint-{trained.global_step}")
    print(f"go on after a break: python examples/custom_callback.py --output-dir {args.output_dir} --resume")
    return {**trained.metrics, "found": len(found), "belief": check.belief}


if __name__ == "__main__":
    main()
