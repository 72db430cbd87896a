"""Cost of an evaluation: `Trainer.evaluate` on 100,000 samples against a plain loop, turn by turn in one process.

The model and the samples of `loop.py`, batches of 8 and of 256; both compute the mean loss. Prints the ratios, medians
over the turns; the bound is 1.05.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import tempfile
import time

import torch
from loop import Net, Points
from torch.utils.data import DataLoader

from trainer_kit import Trainer, TrainingArguments


def plain(model: Net, dataset: Points, batch_size: int) -> tuple[float, float]:
    """Mean loss and seconds of a loop as one would write it by hand."""
    begin = time.perf_counter()
    total = torch.zeros(())
    model.eval()
    with torch.no_grad():
        for batch in DataLoader(dataset, batch_size=batch_size):
            total += model(**batch)["loss"] * len(batch["labels"])
    return total.item() / len(dataset), time.perf_counter() - begin


def compare(batch_size: int, samples: int, turns: int) -> None:
    """Prints the seconds and their ratio; both losses must agree."""
    model, dataset = Net(), Points(samples)
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            folder, per_device_eval_batch_size=batch_size, use_cpu=True, disable_tqdm=True, report_to="none",
            log_level="error",
        )  # fmt: skip
        trainer = Trainer(model, args, eval_dataset=dataset)
        gc.collect()
        gc.freeze()  # a full collection takes as long as 100 batches, and would meet one of the two
        rows = []
        for turn in range(turns + 1):
            loss, by_hand = plain(model, dataset, batch_size)
            begin = time.perf_counter()
            metrics = trainer.evaluate()
            ours = time.perf_counter() - begin
            assert abs(metrics["eval_loss"] - loss) < 1e-4, (metrics["eval_loss"], loss)
            if turn:  # the first warms up
                rows.append((by_hand, ours))
    by_hand, ours = (statistics.median(column) for column in zip(*rows, strict=True))
    ratios = sorted(row[1] / row[0] for row in rows)
    print(
        f"{samples:,} samples in batches of {batch_size}: plain loop {by_hand:.2f} s, Trainer {ours:.2f} s, ratio "
        f"{statistics.median(ratios):.3f} (from {ratios[0]:.3f} to {ratios[-1]:.3f})"
    )


def main() -> None:
    """Compares both batch sizes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=100_000)
    parser.add_argument("--turns", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    for batch_size in (8, 256):
        compare(batch_size, options.samples, options.turns)


if __name__ == "__main__":
    main()
