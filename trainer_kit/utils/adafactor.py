"""`UnscaledAdafactor`: Adafactor as transformers' Trainer uses it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_TINY = 1e-30
"""Added to squared gradients."""


class UnscaledAdafactor(torch.optim.Adafactor):
    """Adafactor (https://arxiv.org/abs/1804.04235) with an absolute learning rate.

    Updates are those of transformers' Adafactor with `scale_parameter=False, relative_step=False`: the learning rate is
    neither multiplied by the size of the weights nor bounded by the number of steps, as that of `torch.optim.Adafactor`
    is. Steps do not wait for the device. The state has torch's names and shapes.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Take a step.

        Args:
            closure: Reevaluates the model and returns the loss; None: gradients are ready.

        Returns:
            The closure's loss; None without a closure.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            lists: list[list[Any]] = [[], [], [], [], [], []]
            self._init_group(group, *lists)
            for tensors in zip(*lists, strict=True):
                _update(group, *tensors)
        return loss


def _update(
    group: dict[str, Any],
    parameter: torch.Tensor,
    grad: torch.Tensor,
    row_var: torch.Tensor | None,
    col_var: torch.Tensor | None,
    variance: torch.Tensor | None,
    step: torch.Tensor,
) -> None:
    """Update a parameter, in float32 at least; `step` is on the host."""
    rate = group["lr"]
    step += 1
    weight = step.item() ** group["beta2_decay"]
    if group["weight_decay"]:
        parameter.mul_(1 - rate * group["weight_decay"])
    grad = grad.to(torch.promote_types(grad.dtype, torch.float32))
    square = (grad * grad).add_(_TINY)
    if variance is None:
        assert row_var is not None
        assert col_var is not None
        row_var.lerp_(square.mean(dim=-1, keepdim=True).to(row_var.dtype), weight)
        col_var.lerp_(square.mean(dim=-2, keepdim=True).to(col_var.dtype), weight)
        rows, columns = row_var.to(grad.dtype), col_var.to(grad.dtype)
        update = (rows / rows.mean(dim=-2, keepdim=True)).rsqrt_() * columns.rsqrt() * grad
    else:
        variance.lerp_(square.to(variance.dtype), weight)
        update = variance.to(grad.dtype).rsqrt() * grad
    size = update.norm(2) / (update.numel() ** 0.5 * group["d"])
    parameter.add_((update / size.clamp(min=1.0)).mul_(-rate).to(parameter.dtype))
