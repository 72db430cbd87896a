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


class Embedded(nn.Module):
    """Embeddings of several kinds, hidden layers and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.pos_embed = nn.Parameter(torch.zeros(4, 8))
        self.bias_table = nn.Parameter(torch.zeros(4, 8))
        self.table = nn.Embedding(6, 8)
        self.convolution = nn.Conv1d(8, 8, 3)
        self.first = nn.Linear(8, 8)
        self.last = nn.Linear(8, 2)
        self.norm = nn.LayerNorm(2)
