"""`Muon`: torch's Muon for matrices of hidden layers, and its AdamW for all other parameters."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from trainer_kit.utils.hidden_matrices import hidden_matrices

_OWN_OPTION = "ns_steps"
"""Option that groups of Muon have, and groups of AdamW do not."""


class Muon(torch.optim.Optimizer):
    """Muon and AdamW in one optimizer, with the parameter groups and states of both.

    A step is the step of `torch.optim.Muon`, then that of `torch.optim.AdamW`, each on its own groups, bit for bit. The
    learning rate of Muon is scaled to AdamW's size of updates (https://arxiv.org/abs/2502.16982), so that both take the
    same one.

    Args:
        matrices: Groups of 2-D parameters for Muon.
        others: Groups of the other parameters, for AdamW. A group that is added later becomes one of these.
        adamw: Options of AdamW; Muon takes the learning rate from here.
        options: Options of Muon.
    """

    def __init__(self, matrices: list[Any], others: list[Any], adamw: dict[str, Any], **options: Any) -> None:
        first = torch.optim.Muon(matrices, lr=adamw["lr"], adjust_lr_fn="match_rms_adamw", **options)
        second = torch.optim.AdamW(others or [{"params": [nn.Parameter()]}], **adamw)
        super().__init__([*first.param_groups, *(second.param_groups if others else ())], {})
        self.defaults = second.defaults  # for groups that are added later

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
        for kind in (torch.optim.Muon, torch.optim.AdamW):
            groups = [group for group in self.param_groups if (_OWN_OPTION in group) == (kind is torch.optim.Muon)]
            part: Any = object.__new__(kind)
            part.__dict__.update(vars(self), param_groups=groups)  # it writes into the same state
            inspect.unwrap(kind.step)(part)  # without hooks, which are those of the whole step
        return loss


def split_matrices(model: nn.Module, groups: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Divide parameter groups into those for Muon and those for AdamW.

    Args:
        model: The model, whose `hidden_matrices` Muon takes.
        groups: Groups, whose "params" are (name, parameter) pairs.
    """
    matrices = hidden_matrices(model)
    divided = []
    for is_hidden in (True, False):
        parts = [
            {**group, "params": [pair for pair in group["params"] if (pair[1] in matrices) == is_hidden]}
            for group in groups
        ]
        divided.append([group for group in parts if group["params"]])
    return divided[0], divided[1]
