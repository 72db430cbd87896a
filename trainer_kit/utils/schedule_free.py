"""Optimizers of the package schedulefree, whose switches between training and averaged weights are exact."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

_STASH = "training_weights"

if TYPE_CHECKING:
    _Base = torch.optim.Optimizer
else:
    _Base = object


class _ExactSwitch(_Base):
    """Keeps the training weights while a parameter has the averaged ones.

    schedulefree computes each of the two from the other, so that every evaluation and checkpoint would change training
    by rounding. The state of a checkpoint has both.
    """

    @torch.no_grad()
    def eval(self) -> None:
        """Give the parameters the averaged weights."""
        for group in self.param_groups:
            for parameter in group["params"] if group["train_mode"] else ():
                if "z" in self.state[parameter]:
                    self.state[parameter][_STASH] = parameter.detach().clone()
        super().eval()  # type: ignore[misc]

    @torch.no_grad()
    def train(self) -> None:
        """Give the parameters the training weights."""
        super().train()  # type: ignore[misc]
        for group in self.param_groups:
            for parameter in group["params"]:
                if (weights := self.state[parameter].pop(_STASH, None)) is not None:
                    parameter.copy_(weights)


def schedule_free(name: str, groups: list[dict[str, Any]], **options: Any) -> torch.optim.Optimizer:
    """Return an optimizer of schedulefree in training mode.

    Args:
        name: Name of its class.
        groups: The parameter groups.
        **options: Options of the class.

    Raises:
        ImportError: If schedulefree is not installed.
    """
    try:
        base = getattr(importlib.import_module("schedulefree"), name)
    except ImportError as error:
        raise ImportError(
            "optim='schedule_free_…' needs a package of its own; run `pip install schedulefree`"
        ) from error
    optimizer = type(name, (_ExactSwitch, base), {})(groups, **options)
    optimizer.train()
    return optimizer  # type: ignore[no-any-return]


def switches_weights(optimizer: Any) -> bool:
    """Return whether an optimizer has averaged weights for evaluation, as those of schedulefree have."""
    return bool(optimizer.param_groups) and "train_mode" in optimizer.param_groups[0]


def set_training(optimizer: Any, training: bool) -> None:
    """Give the parameters the training or the averaged weights, if the optimizer has both."""
    if switches_weights(optimizer):
        (optimizer.train if training else optimizer.eval)()


@contextlib.contextmanager
def averaged_weights(optimizer: Any, before_return: Callable[[], object] = lambda: None) -> Iterator[None]:
    """Enter the context in which the parameters have the averaged weights, if the optimizer has any.

    Args:
        optimizer: The optimizer; None before a training.
        before_return: Called before the parameters get their training weights again.
    """
    if optimizer is None or not switches_weights(optimizer) or not optimizer.param_groups[0]["train_mode"]:
        yield
        return
    optimizer.eval()
    try:
        yield
        before_return()
    finally:
        optimizer.train()
