"""`LocalSGD`: training in which processes average their weights every few steps instead of each step's gradients."""

from __future__ import annotations

from types import TracebackType
from typing import Any

import torch

from trainer_kit.accelerator.accelerator import Accelerator
from trainer_kit.accelerator.utils.enums import DistributedType

__all__ = ["LocalSGD"]


class LocalSGD:
    """Context in which processes train alone, and average their weights every few steps and at its end.

    Call `step()` after each optimizer step. Each call counts, also while gradients accumulate, as under accelerate: in
    a loop that calls it after each batch, `local_sgd_steps` is a number of batches. See
    <https://arxiv.org/abs/1805.09767>.

    Args:
        accelerator: The Accelerator that has prepared the model.
        model: The prepared model.
        local_sgd_steps: Calls of `step()` between two averages.
        enabled: Whether the context has an effect.

    Raises:
        ValueError: If the model is sharded, or on XLA: each step exchanges data there.
    """

    def __init__(
        self, accelerator: Accelerator, model: torch.nn.Module, local_sgd_steps: int, enabled: bool = True
    ) -> None:
        kind = accelerator.distributed_type
        if kind in (DistributedType.FSDP, DistributedType.XLA) and enabled:
            raise ValueError(f"LocalSGD is not possible with {kind.value}; use enabled=False")
        self.accelerator = accelerator
        self.model = model
        self.local_sgd_steps = local_sgd_steps
        self.enabled = enabled and accelerator.num_processes > 1
        self.num_steps = 0
        self._no_sync: Any = None

    def __enter__(self) -> LocalSGD:
        if self.enabled:
            self._no_sync = self.accelerator.no_sync(self.model)
            self._no_sync.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self.enabled:
            self._no_sync.__exit__(kind, error, traceback)
            if error is None:
                self._average()

    def step(self) -> None:
        """Count a call, and average the weights if it is due. Collective where it is."""
        self.num_steps += 1
        if self.enabled and self.num_steps % self.local_sgd_steps == 0:
            self._average()

    @torch.no_grad()
    def _average(self) -> None:
        for parameter in self.model.parameters():
            parameter.copy_(self.accelerator.reduce(parameter, "mean"))
