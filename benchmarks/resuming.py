"""Cost of resuming: samples fetched before the first needed one, and seconds to the first batch, at any position.

Prints a row for step 10 and one for step 10,000, and the ratio of their times to the first batch.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
from torch.utils.data import Dataset

from trainer_kit.data.collate import stack
from trainer_kit.data.map_loader import LoaderConfig, TrainLoader
from trainer_kit.data.sampling import Layout


class Counted(Dataset[Any]):
    """A dataset that counts what is fetched."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.fetched: list[int] = []

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        self.fetched.append(index)
        return {"x": torch.zeros(16)}


def first_batch(step: int, length: int) -> tuple[float, int]:
    """Seconds until the batch of step `step` + 1 is there, and samples fetched in addition to its own."""
    dataset, layout = Counted(length), Layout(batch_size=8)
    loader = TrainLoader(dataset, layout, LoaderConfig(stack, seed=0))
    begin = time.perf_counter()
    batch = next(loader.micro_batches(epoch=0, position=step * layout.global_batch_size, steps=1))
    seconds = time.perf_counter() - begin
    assert dataset.fetched[-len(batch.indices) :] == batch.indices
    return seconds, len(dataset.fetched) - len(batch.indices)


def main() -> None:
    """Measures both positions, turn by turn."""
    length, turns = 8 * 20_000, 20
    times: dict[int, list[float]] = {10: [], 10_000: []}
    wasted = {}
    first_batch(10, length)
    for _ in range(turns):
        for step, seconds in times.items():
            taken, wasted[step] = first_batch(step, length)
            seconds.append(taken)
    medians = {step: statistics.median(seconds) for step, seconds in times.items()}
    for step, median in medians.items():
        print(f"resume at step {step:6,d}: {median * 1e3:7.2f} ms to the first batch, {wasted[step]} samples too many")
    print(f"ratio {medians[10_000] / medians[10]:.3f}")


if __name__ == "__main__":
    main()
