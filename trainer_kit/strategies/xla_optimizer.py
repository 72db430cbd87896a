"""An optimizer's step on XLA, in one and the same graph whatever the numbers it computes with."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def rates_that_vary(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Keeps learning rates from being 0, 1 or one of the step's other numbers: each would be a graph of its own.

    XLA takes 0 and 1 for constants, and equal numbers for one, be they a model's epsilon or what clipping adds to a
    norm. A rate of 1e-30 changes no weight, and one that is a 2**22nd larger hardly any.
    """
    before = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = (float(group["lr"]) or 1e-30) * (1 + 2**-22)
    try:
        yield
    finally:
        for group, rate in zip(optimizer.param_groups, before, strict=True):
            group["lr"] = rate


def is_adam(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it is torch's own Adam or AdamW, whose step torch_xla has in one operation a parameter."""
    return type(optimizer) in (torch.optim.Adam, torch.optim.AdamW) and not any(
        group["capturable"] or group["differentiable"] for group in optimizer.param_groups
    )


def step_adam(optimizer: torch.optim.Optimizer, leaves_out: torch.Tensor) -> None:
    """A step of torch's Adam or AdamW; a scalar of 1.0 on the device leaves it out.

    torch's own step computes with Python numbers, among them 1 - lr * weight_decay, which is 1 for small rates, and
    1 - beta2**step, which comes to be 1: each time another graph.
    """
    syncfree = importlib.import_module("torch_xla.amp.syncfree")
    decouples = isinstance(optimizer, torch.optim.AdamW)
    plain = [each for group in optimizer.param_groups if not group["amsgrad"] for each in group["params"]]
    states = [optimizer.state[each] for each in plain if each in optimizer.state]
    for state in states:  # torch_xla wants an entry that torch's optimizers do not have
        state["max_exp_avg_sq"] = leaves_out
    (syncfree.AdamW if decouples else syncfree.Adam).step(optimizer, found_inf=leaves_out)
    for parameter in plain:
        optimizer.state.get(parameter, {}).pop("max_exp_avg_sq", None)
