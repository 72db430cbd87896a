"""A model with a buffer that grows in each training pass, and that the module resizes when it is loaded."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class Bank(nn.Module):
    """Keeps its outputs, as memory banks do."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kept", torch.empty(0, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.kept = torch.cat([self.kept, x.detach()])
        return x + self.kept.mean(0)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        self.kept = torch.empty_like(state_dict[f"{prefix}kept"])
        super()._load_from_state_dict(state_dict, prefix, *args)


class Remembering(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(3, 2)
        self.norm = nn.BatchNorm1d(2)
        self.bank = Bank()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.bank(self.norm(self.linear(x)))
        return found
