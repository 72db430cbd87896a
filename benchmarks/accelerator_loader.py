"""What a batch costs that a prepared loader of the Accelerator gives, against torch's DataLoader and accelerate's.

All read 8 samples of 16 numbers in a batch, shuffled and without workers: here the loader counts most.

Run: python benchmarks/accelerator_loader.py
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

SAMPLES, BATCH, TURNS = 16_000, 8, 9


def microseconds(loader: Iterable[Any]) -> float:
    """Return the mean time of a batch over an epoch."""
    start = time.perf_counter()
    count = sum(1 for _ in loader)
    return 1e6 * (time.perf_counter() - start) / count


def main() -> None:
    """Prints the median time of a batch of each, and the ratios to torch's; turn by turn."""
    import accelerate

    import trainer_kit

    torch.set_num_threads(1)
    dataset = TensorDataset(torch.randn(SAMPLES, 16), torch.zeros(SAMPLES, dtype=torch.int64))
    loaders: dict[str, Any] = {
        "torch's DataLoader": DataLoader(dataset, BATCH, shuffle=True),
        "accelerate": accelerate.Accelerator(cpu=True).prepare(DataLoader(dataset, BATCH, shuffle=True)),
        "trainer_kit": trainer_kit.Accelerator(cpu=True).prepare(DataLoader(dataset, BATCH, shuffle=True)),
    }
    turns = [{name: microseconds(loader) for name, loader in loaders.items()} for _ in range(TURNS)]
    for name in loaders:
        ratios = [turn[name] / turn["torch's DataLoader"] for turn in turns]
        spread = f"(from {min(ratios):.2f} to {max(ratios):.2f})"
        time_of_a_batch = statistics.median(turn[name] for turn in turns)
        print(f"{name:<19}{time_of_a_batch:6.1f} us a batch, ratio {statistics.median(ratios):.2f} {spread}")


if __name__ == "__main__":
    main()
