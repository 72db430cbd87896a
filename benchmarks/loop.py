"""Cost of the loop: steps per second of the Trainer against a plain PyTorch loop, turn by turn in one process.

An MLP 16-32-2, batch 8, dict batches, AdamW with a linear schedule, clipping to 1.0, a log every 50 steps. The plain
loop is measured with AdamW as it comes, and with the fused kernel that the Trainer chooses by itself. Prints the time
of a step of all three and the ratios, medians over the turns, with their quartiles. Turns are short, so that the load
of the machine is about the same for all three ways of one.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from typing import Any
from unittest import mock

import torch
from torch.utils.data import DataLoader, Dataset

from trainer_kit import Trainer, TrainingArguments
from trainer_kit.loop.training_loop import TrainingLoop


class Points(Dataset[Any]):
    """Random points in 16 dimensions, in two classes."""

    def __init__(self, length: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(length, 16, generator=generator)
        self.labels = (self.x[:, 0] > 0).long()

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": self.x[index], "labels": self.labels[index]}


class Net(torch.nn.Module):
    """Two layers; returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 2))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.layers(x)
        return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}


def plain(dataset: Points, steps: int, fused: bool) -> float:
    """Seconds a step of a loop as one would write it by hand."""
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / steps))
    step, total, losses = 0, torch.zeros(()), []
    begin = time.perf_counter()
    while step < steps:
        for batch in DataLoader(dataset, batch_size=8, shuffle=True):
            loss = model(**batch)["loss"]
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            total += loss.detach()
            step += 1
            if step % 50 == 0:
                losses.append(total.item() / 50)
                total.zero_()
            if step == steps:
                break
    return (time.perf_counter() - begin) / steps


def trainer(dataset: Points, steps: int) -> float:
    """Seconds a step of the Trainer with its defaults, progress bar off."""
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            output_dir=folder, max_steps=steps, learning_rate=1e-3, logging_steps=50, disable_tqdm=True, use_cpu=True,
            save_strategy="no", log_level="error",
        )  # fmt: skip
        run = Trainer(Net(), args, dataset)
        clock: list[float] = []
        take_steps = TrainingLoop.take_steps

        def timed(loop: TrainingLoop) -> None:
            begin = time.perf_counter()
            take_steps(loop)
            clock.append(time.perf_counter() - begin)

        with mock.patch.object(TrainingLoop, "take_steps", timed):
            run.train()
        return clock[0] / steps


def main() -> None:
    """Runs the turns and prints the medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--turns", type=int, default=25)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dataset = Points(8 * 500)
    plain(dataset, 200, True), trainer(dataset, 200)  # warm-up
    rows = [
        (plain(dataset, options.steps, True), plain(dataset, options.steps, False), trainer(dataset, options.steps))
        for _ in range(options.turns)
    ]
    fused, default, ours = (statistics.median(column) for column in zip(*rows, strict=True))
    print(f"plain loop, fused AdamW     {fused * 1e6:8.1f} us a step")
    print(f"plain loop, default AdamW   {default * 1e6:8.1f} us a step")
    print(f"Trainer                     {ours * 1e6:8.1f} us a step")
    for place, name in ((1, "default"), (0, "fused")):
        ratios = sorted(row[2] / row[place] for row in rows)
        low, middle, high = statistics.quantiles(ratios, n=4)
        spread = f"({low:.3f} to {high:.3f})"
        print(f"ratio, {name + ' AdamW':20} {middle:8.3f} {spread}")


if __name__ == "__main__":
    main()
