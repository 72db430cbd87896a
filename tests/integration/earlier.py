"""A run whose first half was saved by an earlier version: as a script, it trains to a step and prints a checksum.

To save one again, with the version that is to be the earlier one::

    PYTHONPATH=tests ATEN_CPU_CAPABILITY=default MKL_CBWR=COMPATIBLE python tests/integration/earlier.py FOLDER 8
    PYTHONPATH=tests ATEN_CPU_CAPABILITY=default MKL_CBWR=COMPATIBLE python tests/integration/earlier.py FOLDER 16
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from scenarios.task import StopAt, checksum
from torch.utils.data import Dataset

from trainer_kit import Trainer, TrainingArguments
from trainer_kit.callbacks import EMA


class Points(Dataset[Any]):
    """Points of the plane with noise from torch's generator."""

    def __len__(self) -> int:
        return 30

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        noise = torch.rand(2, dtype=torch.float64)
        return {"x": torch.tensor([index % 5, index // 5], dtype=torch.float64) + noise, "labels": noise.sum()}


class Net(torch.nn.Module):
    """A tied weight, a buffer, dropout and a transposed weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(2, 4)
        self.second, self.third = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
        self.third.weight = self.second.weight
        self.norm, self.dropout = torch.nn.BatchNorm1d(4), torch.nn.Dropout(0.25)
        self.head = torch.nn.Linear(4, 1)
        self.first.weight.data = self.first.weight.data.t().contiguous().t()
        self.double()

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.norm(torch.relu(self.third(torch.relu(self.second(torch.relu(self.first(x)))))))
        return {"loss": (self.head(self.dropout(hidden)).squeeze(-1) - labels).square().mean()}


def main(output_dir: str, last_step: int) -> str:
    """Trains, from a checkpoint where there is one; returns a checksum of the weights and of what is saved."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    args = TrainingArguments(
        output_dir=output_dir, max_steps=16, per_device_train_batch_size=4, gradient_accumulation_steps=2,
        learning_rate=0.05, weight_decay=0.1, lr_scheduler_type="cosine", warmup_steps=3, max_grad_norm=0.5,
        logging_steps=2, save_steps=4, save_total_limit=1, eval_strategy="steps", eval_steps=8, use_cpu=True,
        report_to="jsonl", disable_tqdm=True, log_level="warning",
    )  # fmt: skip
    callbacks = [EMA(decay=0.9), StopAt(last_step)]
    trainer = Trainer(Net(), args, Points(), Points(), callbacks=callbacks)
    trainer.train(resume_from_checkpoint=True)
    assert trainer.run.optimizer is not None
    model, optimizer = trainer.run.model.state_dict(), trainer.run.optimizer.state_dict()
    return checksum(model, optimizer, trainer.events.state_dict()["EMA"])


if __name__ == "__main__":
    print(main(sys.argv[1], int(sys.argv[2])))
