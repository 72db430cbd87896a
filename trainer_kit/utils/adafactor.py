"""`Adafactor`: torch's Adafactor, with steps that do not wait for the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class Adafactor(torch.optim.Adafactor):
    """Adafactor for CUDA devices, where torch's own step waits for two norms of each parameter.

    State and updates are those of `torch.optim.Adafactor(..., foreach=True)`, in float32 and float64 bit for bit.
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
    """Update a parameter; the formulas are those of `torch.optim.Adafactor`, and `step` is on the host."""
    lr, (eps1, eps2), size = float(group["lr"]), group["eps"], parameter.numel() ** 0.5
    eps1 = torch.finfo(parameter.dtype).eps if eps1 is None else eps1
    step += 1
    weight = step.item() ** group["beta2_decay"]
    rate = (_norm(parameter) / size).clamp_(min=eps2).mul_(min(lr, 1 / step.item() ** 0.5))
    if group["weight_decay"]:
        parameter.mul_(1 - lr * group["weight_decay"])
    if group["maximize"]:
        grad = -grad
    if variance is None:
        assert row_var is not None
        assert col_var is not None
        row_var.lerp_(grad.norm(dim=-1, keepdim=True).square_().div_(grad.size(-1)), weight)
        col_var.lerp_(grad.norm(dim=-2, keepdim=True).square_().div_(grad.size(-2)), weight)
        estimate = (row_var @ col_var).div_(row_var.mean(dim=-2, keepdim=True).clamp_(min=eps1))
    else:
        estimate = variance.lerp_(grad * grad, weight).clone()
    update = estimate.clamp_(min=eps1 * eps1).rsqrt_().mul_(grad)
    factor = rate.neg_().div_((_norm(update) / (size * group["d"])).clamp_(min=1.0))
    # A tensor factor is rounded to the other tensor's dtype before the product, a number only after it.
    wide = torch.promote_types(update.dtype, torch.float32)
    parameter.add_(update.to(wide).mul_(factor.to(wide)).to(update.dtype))


def _norm(tensor: torch.Tensor) -> torch.Tensor:
    """Return the 2-norm, rounded to the tensor's dtype, in the precision of Python's numbers."""
    norm: torch.Tensor = tensor.norm(2)
    return norm.double()
