"""What the Accelerator adds to a loop of one's own, against the same loop without it and with accelerate's.

Two measures, both with 8 samples of 16 numbers in a batch, shuffled and without workers, where each call counts most: a
batch of a prepared loader, and a step of the whole loop, with an MLP 16-32-2, fused AdamW, a linear schedule and
clipping to 1.0. Medians over the turns, each of which runs all three.

Run: python benchmarks/accelerator.py
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any

import accelerate
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import trainer_kit

SAMPLES, BATCH, TURNS = 16_000, 8, 9
PLAIN = "without"


def loader() -> DataLoader[Any]:
    """Return the loader of all measures."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(SAMPLES, 16, generator=generator)
    return DataLoader(TensorDataset(x, (x[:, 0] > 0).long()), BATCH, shuffle=True)


def microseconds(pass_over: Callable[[], int]) -> float:
    """Return the mean time of a batch over an epoch."""
    start = time.perf_counter()
    count = pass_over()
    return 1e6 * (time.perf_counter() - start) / count


def loading(accelerator: Any) -> Callable[[], int]:
    """Return a pass over a loader that does nothing with its batches."""
    batches: Iterable[Any] = loader() if accelerator is None else accelerator.prepare(loader())
    return lambda: sum(1 for _ in batches)


def training(accelerator: Any) -> Callable[[], int]:
    """Return an epoch of a whole loop, written as one writes it with or without an accelerator."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 2))
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    scheduler: Any = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + 1e-4 * step))
    batches: Any = loader()
    if accelerator is None:

        def without() -> int:
            for x, labels in batches:
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x), labels).backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
            return len(batches)

        return without
    model, optimizer, batches, scheduler = accelerator.prepare(model, optimizer, batches, scheduler)

    def with_accelerator() -> int:
        for x, labels in batches:
            with accelerator.accumulate(model):
                optimizer.zero_grad()
                accelerator.backward(nn.functional.cross_entropy(model(x), labels))
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
        return len(batches)

    return with_accelerator


def main() -> None:
    """Prints the median time of each, and the ratios to that without an accelerator."""
    torch.set_num_threads(1)
    accelerators = {PLAIN: None, "accelerate": accelerate.Accelerator(cpu=True)}
    accelerators["trainer_kit"] = trainer_kit.Accelerator(cpu=True)
    for what, make in (("loader alone", loading), ("whole loop", training)):
        passes = {name: make(each) for name, each in accelerators.items()}
        turns = [{name: microseconds(each) for name, each in passes.items()} for _ in range(TURNS)]
        print(what)
        for name in passes:
            ratios = [turn[name] / turn[PLAIN] for turn in turns]
            spread = f"(from {min(ratios):.2f} to {max(ratios):.2f})"
            time_of_a_batch = statistics.median(turn[name] for turn in turns)
            print(f"  {name:<12}{time_of_a_batch:7.1f} us a batch, ratio {statistics.median(ratios):.2f} {spread}")


if __name__ == "__main__":
    main()
