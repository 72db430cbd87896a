"""`UnscaledAdafactor`: Adafactor as transformers' Trainer uses it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_TINY = 1e-30
"""Added to squared gradients."""

_VARIANCES = {"row_var", "col_var", "variance"}


class UnscaledAdafactor(torch.optim.Adafactor):
    """Adafactor (https://arxiv.org/abs/1804.04235) with an absolute learning rate.

    Updates are those of transformers' Adafactor with `scale_parameter=False, relative_step=False`: the learning rate is
    neither multiplied by the size of the weights nor bounded by the number of steps, as that of `torch.optim.Adafactor`
    is. Steps do not wait for the device. The state has torch's names and shapes, and float32 for weights of 16 bits.
    """

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state; torch alone would round it to the dtype of the weights."""
        super().load_state_dict(state_dict)
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for number, parameter in zip(numbers, parameters, strict=True):
            saved = state_dict["state"].get(number, {})
            for name in _VARIANCES & saved.keys():
                self.state[parameter][name] = saved[name].to(parameter.device, copy=True)

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
            parameters: list[torch.Tensor] = []
            self._init_group(group, parameters, [], [], [], [], [])
            for parameter in parameters:
                _update(group, parameter, self.state[parameter])
        return loss


def _update(group: dict[str, Any], parameter: torch.Tensor, state: dict[str, Any]) -> None:
    """Update a parameter and its state, in float32 at least; the step's number is on the host."""
    assert parameter.grad is not None
    dtype = torch.promote_types(parameter.grad.dtype, torch.float32)
    grad, values = parameter.grad.to(dtype), parameter.to(dtype)
    for name in _VARIANCES & state.keys():  # torch makes them in the gradient's dtype
        state[name] = state[name].to(dtype)
    rate = group["lr"]
    state["step"] += 1
    weight = state["step"].item() ** group["beta2_decay"]
    if group["weight_decay"]:
        values.mul_(1 - rate * group["weight_decay"])
    square = (grad * grad).add_(_TINY)
    if "variance" in state:
        update = state["variance"].lerp_(square, weight).rsqrt() * grad
    else:
        rows = state["row_var"].lerp_(square.mean(dim=-1, keepdim=True), weight)
        columns = state["col_var"].lerp_(square.mean(dim=-2, keepdim=True), weight)
        update = (rows / rows.mean(dim=-2, keepdim=True)).rsqrt_() * columns.rsqrt() * grad
    size = update.norm(2) / (update.numel() ** 0.5 * group["d"])
    values.add_((update / size.clamp(min=1.0)).mul_(-rate))
    if values is not parameter:
        parameter.copy_(values)
