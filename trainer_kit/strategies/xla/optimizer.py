"""An optimizer's step on XLA, in one and the same graph whatever the numbers it computes with."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch

_LEAST = 1e-30
"""In place of a learning rate of 0, by which some formulas divide; it changes no weight."""


def computes_on_device(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it can keep all numbers of its step on the device, which torch calls capturable (Adam, AdamW, …)."""
    return all("capturable" in group for group in optimizer.param_groups)


@contextlib.contextmanager
def varying_rates(optimizer: torch.optim.Optimizer, operand: Callable[[float], torch.Tensor]) -> Iterator[None]:
    """Lets learning rates, and what follows from them, vary without another graph; schedules go on with numbers.

    XLA takes a Python number of 0 or 1 for a constant, and equal ones for one, be they a model's epsilon. AdamW
    computes with 1 - lr * weight_decay, which is 1 for small rates, and with 1 - beta2**step, which comes to be 1: so
    its numbers are kept on the device. For other optimizers a rate a 2**22nd larger is hardly ever such a number.
    """
    before = [{name: group[name] for name in ("lr", "capturable") if name in group} for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        if isinstance(group["lr"], torch.Tensor):
            continue
        rate = group["lr"] or _LEAST
        if "capturable" in group:
            group["lr"], group["capturable"] = operand(rate), True
        else:
            group["lr"] = rate * (1 + 2**-22)
    try:
        yield
    finally:
        for group, values in zip(optimizer.param_groups, before, strict=True):
            for name, value in values.items():
                group[name] = value
