"""`Prepared`: the objects whose state an `Accelerator` saves."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from trainer_kit.accelerator.loader import PreparedLoader
from trainer_kit.accelerator.validation import KINDS
from trainer_kit.accelerator.wrappers import PreparedOptimizer, PreparedScheduler


@dataclasses.dataclass
class Prepared:
    """All objects that an Accelerator has prepared, in order, and those registered for checkpointing."""

    models: list[torch.nn.Module] = dataclasses.field(default_factory=list)
    optimizers: list[PreparedOptimizer] = dataclasses.field(default_factory=list)
    schedulers: list[PreparedScheduler] = dataclasses.field(default_factory=list)
    loaders: list[PreparedLoader] = dataclasses.field(default_factory=list)
    registered: list[Any] = dataclasses.field(default_factory=list)

    def counts(self) -> dict[str, int]:
        """Return the number of objects of each kind."""
        return {kind: len(getattr(self, kind)) for kind in KINDS}

    def clear(self) -> None:
        """Drop all references."""
        for field in dataclasses.fields(self):
            getattr(self, field.name).clear()
