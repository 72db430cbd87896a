"""Memory of an evaluation with streaming metrics: flat, however many samples.

Evaluates 1,000, 10,000 and 100,000 samples and prints by how much the resident memory of the process grew in each, and
in addition what `compute_metrics` needs, which collects all predictions. Ends with the ratio of the larger two.
"""

from __future__ import annotations

import gc
import tempfile
from typing import Any

import psutil
import torch
from torch.utils.data import Dataset

from trainer_kit import EvalPrediction, Trainer, TrainingArguments

CLASSES = 100


class Points(Dataset[Any]):
    """Points made when they are asked for, so that the dataset itself takes no memory."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": torch.full((16,), index % 7 / 7), "labels": torch.tensor(index % CLASSES)}


class Net(torch.nn.Module):
    """One layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(16, CLASSES)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.layer(x)
        return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}


class Accuracy:
    """A streaming metric of the smallest kind."""

    def reset(self) -> None:
        self.right = torch.zeros((), dtype=torch.int64)
        self.seen = 0

    def update(self, predictions: torch.Tensor, labels: torch.Tensor) -> None:
        self.right += (predictions.argmax(-1) == labels).sum()
        self.seen += len(labels)

    def compute(self) -> float:
        return int(self.right) / self.seen


def whole(prediction: EvalPrediction) -> dict[str, float]:
    """The same figure from all predictions at once."""
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


def growth(length: int, folder: str, **metrics: Any) -> float:
    """MiB by which the process's memory grew in an evaluation, at its largest."""
    args = TrainingArguments(
        output_dir=folder, per_device_eval_batch_size=64, use_cpu=True, report_to="none", disable_tqdm=True,
        log_level="warning",
    )  # fmt: skip
    trainer = Trainer(Net(), args, eval_dataset=Points(length), **metrics)
    peak = 0
    process = psutil.Process()
    gc.collect()
    before = process.memory_info().rss

    def watch(*_: Any) -> None:
        nonlocal peak
        peak = max(peak, process.memory_info().rss)

    trainer.run.model.register_forward_hook(watch)
    trainer.evaluate()
    return max(0, peak - before) / 2**20


def main() -> None:
    """Prints the table."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        growth(1_000, folder, metrics={"accuracy": Accuracy()})  # warm-up
        rows = {
            length: (
                growth(length, folder, metrics={"accuracy": Accuracy()}),
                growth(length, folder, compute_metrics=whole),
            )
            for length in (1_000, 10_000, 100_000)
        }
    for length, (streamed, collected) in rows.items():
        print(f"{length:7,d} samples: streaming metrics +{streamed:6.2f} MiB, compute_metrics +{collected:6.2f} MiB")
    print(f"ratio of 100,000 to 10,000 samples, streaming: {(rows[100_000][0] + 1) / (rows[10_000][0] + 1):.3f}")


if __name__ == "__main__":
    main()
