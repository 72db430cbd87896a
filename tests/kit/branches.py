"""A model of which each rank may use a part, and its training."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from trainer_kit import TrainingArguments


class Branches(nn.Module):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.used = nn.Linear(4, 4).double()
        self.norm = nn.BatchNorm1d(4).double()
        self.spare = nn.Linear(4, 4).double()
        self.both = False

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.used(x))
        if self.both:
            hidden = hidden + self.spare(x)
        return (hidden - y).square().mean()


def points(length: int = 12) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(5)
    return [
        {name: torch.randn(4, generator=generator, dtype=torch.float64) for name in ("x", "y")} for _ in range(length)
    ]


def quiet(folder: str, **changes: Any) -> TrainingArguments:
    values: dict[str, Any] = {
        "output_dir": folder, "max_steps": 6, "per_device_train_batch_size": 2, "use_cpu": True, "report_to": "none",
        "disable_tqdm": True, "log_level": "error", "save_strategy": "no", "learning_rate": 0.1, "optim": "sgd",
    }  # fmt: skip
    return TrainingArguments(**(values | changes))


def own_rank() -> int:
    from trainer_kit.config import environment

    return environment.place().rank
