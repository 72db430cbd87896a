"""A model whose `state_dict` holds more than tensors."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

SETTINGS: dict[str, Any] = {
    "sizes": (3, [2, (1,)]), "rates": {"a": 0.1, "b": -0.0, "c": math.inf, "d": math.nan}, "big": 2**70, "none": None,
    "flag": True, "name": "ä", "empty": {}, "nothing": (),
}  # fmt: skip


class Counter(nn.Module):
    """Counts its training passes, outside of its tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.passes, self.last = 0, torch.zeros(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.passes += 1
            self.last = x.detach().mean(0)
        return x * (1 + 1 / (1 + self.passes))

    def get_extra_state(self) -> dict[str, Any]:
        return {"passes": self.passes, "last": self.last, "history": (self.passes, float(self.passes) / 3)}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        assert state["history"] == (state["passes"], state["passes"] / 3)
        self.passes, self.last = state["passes"], state["last"]


class Valued(nn.Module):
    """Has settings among its tensors, as neuralop's models do."""

    def __init__(self, settings: Any = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.counter = nn.Linear(3, 2), Counter()
        self.settings = SETTINGS if settings is None else settings
        self.loaded: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.counter(self.linear(x))
        return found

    def state_dict(self, *args: Any, **options: Any) -> Any:
        return {**super().state_dict(*args, **options), "_metadata": self.settings}

    def load_state_dict(self, state_dict: Any, *args: Any, **options: Any) -> Any:
        self.loaded = state_dict.pop("_metadata")
        return super().load_state_dict(state_dict, *args, **options)
