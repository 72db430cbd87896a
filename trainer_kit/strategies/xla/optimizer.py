"""Optimizer steps on XLA that reuse one graph for all learning rates."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch

_LEAST = 1e-30
"""Value used in place of a learning rate of 0, by which some formulas divide; it changes no weight."""


def computes_on_device(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the optimizer can keep all numbers of its step on the device (torch's `capturable`)."""
    return all("capturable" in group for group in optimizer.param_groups)


@contextlib.contextmanager
def varying_rates(optimizer: torch.optim.Optimizer, operand: Callable[[float], torch.Tensor]) -> Iterator[None]:
    """Let learning rates vary in the enclosed step without a new graph; afterwards they are plain numbers again.

    XLA compiles a Python number of 0 or 1 as a constant, and merges equal numbers, such as a rate and an epsilon.
    AdamW's 1 - lr * weight_decay and 1 - beta2**step may equal 1, so that capturable optimizers keep their numbers on
    the device. For other optimizers the rate is multiplied by 1 + 2**-22, which rarely equals another number.

    Args:
        optimizer: Optimizer whose step is enclosed.
        operand: Returns a number as a tensor on the device.
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
