"""Small models."""

from __future__ import annotations

import torch
from torch import nn


class Linear(nn.Module):
    """Returns its loss, for any kind of batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.layer(x), labels)


class Poisoned(Linear):
    """Its loss is NaN in one step."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.at, self.calls = at, 0

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x, labels) * (float("nan") if self.calls == self.at else 1.0)
