"""Kill a training run and resume it: the weights end up the same, bit for bit.

    python examples/resume.py                      about 30 seconds on 2 CPU cores

One training runs from beginning to end. Another is killed (SIGKILL, as by the out-of-memory killer) in the middle of an
epoch, between two checkpoints, and then resumed with `train(resume_from_checkpoint=True)`. The training has everything
that makes this hard: dropout, random augmentation, two data loading workers, accumulation and a schedule.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import Dataset

from trainer_kit import Callback, Run, Trainer, TrainingArguments
from trainer_kit.callbacks import read_log


class NoisyDigits(Dataset[tuple[torch.Tensor, int]]):
    """Scikit-learn's scanned digits, randomly shifted and with random noise each time they are read."""

    def __init__(self) -> None:
        digits = load_digits()
        self.images = torch.tensor(digits.images, dtype=torch.float32) / 16
        self.labels = digits.target.tolist()

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        shift = int(torch.randint(-1, 2, ()))
        return self.images[index].roll(shift, dims=1) + 0.1 * torch.randn(8, 8), self.labels[index]


class Killer(Callback):
    """Kill the own process after a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, run: Run) -> None:
        if run.state.step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


def loss(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    """Return the mean loss of a batch."""
    images, labels = batch
    return nn.functional.cross_entropy(model(images), labels)


def train(folder: Path, steps: int, kill_at: int | None = None, resume: bool = False) -> None:
    """Train in `folder`, from the beginning or from the newest checkpoint there."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.3), nn.Linear(128, 10))
    args = TrainingArguments(
        output_dir=str(folder),
        max_steps=steps,
        per_device_train_batch_size=16,
        gradient_accumulation_steps=2,
        dataloader_num_workers=2,
        learning_rate=3e-3,
        lr_scheduler_type="cosine",
        logging_steps=5,
        save_steps=steps // 6,
        report_to="jsonl",
        use_cpu=True,  # a GPU may add numbers in another order each time
    )
    callbacks = [] if kill_at is None else [Killer(kill_at)]
    trainer = Trainer(model, args, NoisyDigits(), compute_loss=loss, callbacks=callbacks)
    trainer.train(resume_from_checkpoint=resume)


def in_a_process(folder: Path, steps: int, *options: str) -> int:
    """Train in a separate process; return its exit code: 0, or minus the number of the signal that killed it."""
    command = [sys.executable, __file__, "--train", str(folder), "--steps", str(steps), *options]
    return subprocess.run(command, check=False).returncode


def results(folder: Path, steps: int) -> dict[str, str]:
    """Return checksums of the weights, the optimizer's state and all logged losses of a training."""
    checkpoint = folder / f"checkpoint-{steps}"
    losses = [(each["step"], each["loss"]) for each in read_log(folder / "log.jsonl") if "loss" in each]
    parts = {
        "weights": (checkpoint / "model.safetensors").read_bytes(),
        "optimizer": (checkpoint / "state" / "optimizer.safetensors").read_bytes(),
        "losses": repr(losses).encode(),
    }
    return {name: hashlib.sha256(content).hexdigest() for name, content in parts.items()}


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Train once without a break and once with a kill; return the checksums of both."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output-dir", default="runs/resume", help="a folder for each of the two (%(default)s)")
    parser.add_argument("--short", action="store_true", help="30 steps instead of 300")
    parser.add_argument("--train", metavar="DIR", type=Path, help="internal: one training in this folder")
    parser.add_argument("--steps", type=int, default=300, help="steps (%(default)s)")
    parser.add_argument("--kill-at", type=int, help="internal: the step after which it kills itself")
    parser.add_argument("--resume", action="store_true", help="resume from its newest checkpoint")
    options = parser.parse_args(argv)
    if options.train:
        train(options.train, options.steps, options.kill_at, options.resume)
        return {}
    steps = 30 if options.short else options.steps
    kill_at = steps // 2 + 3
    whole, broken = Path(options.output_dir) / "in-one-go", Path(options.output_dir) / "killed"

    train(whole, steps)
    killed = in_a_process(broken, steps, "--kill-at", str(kill_at))
    newest = max(int(path.name.partition("-")[2]) for path in broken.glob("checkpoint-*"))
    resumed = in_a_process(broken, steps, "--resume")

    expected, got = results(whole, steps), results(broken, steps)
    print(f"\nkilled at step {kill_at} of {steps} by signal {-killed}, newest checkpoint: step {newest}")
    print(f"resumed from there, exit code {resumed}")
    for name, checksum in expected.items():
        verdict = "the same" if got[name] == checksum else "DIFFERENT"
        print(f"{name:>10}: {checksum[:16]} without a break, {got[name][:16]} with the kill: {verdict}")
    print(f"the losses:   {broken}/log.jsonl")
    return {"killed": killed, "resumed": resumed, "expected": expected, "got": got}


if __name__ == "__main__":
    main()
