"""Write the training loop yourself, for one process or many: `Accelerator` has accelerate's names.

    python examples/manual_loop.py                                          about 10 seconds on 2 CPU cores
    trainer-kit launch --num-processes 2 examples/manual_loop.py            the same training on two processes
    torchrun --nproc-per-node 2 examples/manual_loop.py                     started by PyTorch's own launcher
    python examples/manual_loop.py --resume                                 resumes an interrupted run

It classifies the digits that scikit-learn ships, with gradient accumulation, a one-cycle schedule, clipping, optional
mixed precision, an exact evaluation over all processes, and a checkpoint every few steps. The batch is divided among
the processes, so any number of them takes the same steps. Needs scikit-learn.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, TensorDataset, random_split

from trainer_kit import Accelerator, set_seed
from trainer_kit.accelerator import ProjectConfiguration

ACCUMULATION = 2
BATCH_SIZE = 24
PEAK_RATE = 1e-2
CHECKPOINT_STEPS = 20


def make_model() -> nn.Module:
    """Return a classifier of images of 8 x 8 pixels."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.2), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10)
    )


def make_loaders() -> tuple[DataLoader[Any], DataLoader[Any]]:
    """Return loaders for training and for 400 test digits; BATCH_SIZE is the global batch size."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32) / 16
    train_set, test_set = random_split(
        TensorDataset(images, torch.tensor(digits.target)), [1397, 400], torch.Generator().manual_seed(0)
    )
    return DataLoader(train_set, BATCH_SIZE, shuffle=True, drop_last=True), DataLoader(test_set, 4 * BATCH_SIZE)


def accuracy(accelerator: Accelerator, model: nn.Module, batches: Any) -> float:
    """Return the share of correctly classified digits; each counts once, with any number of processes."""
    model.eval()
    right = seen = 0
    for images, labels in batches:
        with torch.no_grad():
            guesses = model(images).argmax(-1)
        guesses, labels = accelerator.gather_for_metrics((guesses, labels))
        right += int((guesses == labels).sum())
        seen += len(labels)
    model.train()
    return right / seen


def train(options: argparse.Namespace) -> dict[str, float]:
    """Train; return the results."""
    set_seed(1)
    accelerator = Accelerator(
        gradient_accumulation_steps=ACCUMULATION,
        split_batches=True,
        mixed_precision=options.mixed_precision,
        log_with="jsonl",
        project_config=ProjectConfiguration(options.output_dir, automatic_checkpoint_naming=True, total_limit=2),
    )
    accelerator.init_trackers("log", config=vars(options))
    model, (train_loader, test_loader) = make_model(), make_loaders()
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_RATE)
    model, optimizer, train_loader, test_loader = accelerator.prepare(model, optimizer, train_loader, test_loader)
    steps_per_epoch = -(-len(train_loader) // ACCUMULATION)  # the last batches of an epoch are a step, too
    schedule = OneCycleLR(optimizer, PEAK_RATE, epochs=options.epochs, steps_per_epoch=steps_per_epoch)
    schedule = accelerator.prepare(schedule)
    if options.resume:
        accelerator.load_state()

    share = 0.0
    for epoch in range(train_loader.epoch, options.epochs):
        losses = []
        for images, labels in train_loader:  # after load_state() it continues where it was
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(images), labels)
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            losses.append(loss.detach())
            if accelerator.sync_gradients and schedule.last_epoch % CHECKPOINT_STEPS == 0:
                accelerator.save_state()
        share = accuracy(accelerator, model, test_loader)
        # Without losses, the epoch was already complete.
        mean = float(accelerator.reduce(torch.stack(losses).mean(), "mean")) if losses else math.nan
        accelerator.print(f"epoch {epoch}: loss {mean:.3f}, test accuracy {share:.2%}")
        accelerator.log({"loss": mean, "accuracy": share, "learning_rate": schedule.get_last_lr()[0]}, step=epoch)
    accelerator.save_model(model, f"{options.output_dir}/model")
    accelerator.print(f"the folder {options.output_dir} has the model in model/, the checkpoints in checkpoints/")
    accelerator.end_training()
    weights = torch.cat([value.flatten() for value in accelerator.get_state_dict(model).values()])
    return {"accuracy": share, "weights": float(weights.double().abs().sum()), "processes": accelerator.num_processes}


def main(argv: Sequence[str] | None = None) -> dict[str, float]:
    """Read the command line and train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output-dir", default="runs/manual_loop", help="checkpoints and logs (%(default)s)")
    parser.add_argument("--epochs", type=int, default=10, help="(%(default)s)")
    parser.add_argument("--mixed-precision", choices=["no", "fp16", "bf16"], help="default: the launcher's")
    parser.add_argument("--resume", action="store_true", help="resume from the newest checkpoint there")
    parser.add_argument("--short", action="store_true", help="2 epochs, to see that everything works")
    options = parser.parse_args(argv)
    if options.short:
        options.epochs = 2
    return train(options)


if __name__ == "__main__":
    main()
