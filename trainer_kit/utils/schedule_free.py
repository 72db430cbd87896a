"""Optimizers with averaged weights for evaluation, such as those of schedulefree: exact switches between the two."""

from __future__ import annotations

import contextlib
import importlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

from trainer_kit.utils.optimizer_state import optimizers_in, state_of

_TRAINING_WEIGHTS = "training_weights"
"""Name of the state that keeps a parameter's training weights while it has the averaged ones.

Most of these optimizers compute each of the two from the other, so that every evaluation and checkpoint would change
training by rounding. The state of a checkpoint has both.
"""

_switched: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()
"""Whether an optimizer was last switched to the training weights."""


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
        kind = getattr(importlib.import_module("schedulefree"), name)
    except ImportError as error:
        raise ImportError(
            "optim='schedule_free_…' needs a package of its own; run `pip install schedulefree`"
        ) from error
    optimizer = kind(groups, **options)
    optimizer.train()
    return optimizer  # type: ignore[no-any-return]


def switching_optimizers(optimizer: torch.optim.Optimizer | None) -> list[Any]:
    """Return the optimizers in an optimizer that have averaged weights for evaluation, by their `train` and `eval`.

    One inside another that switches is left to it.
    """
    found: list[Any] = []
    inner: set[int] = set()
    for part in optimizers_in(optimizer):
        if id(part) not in inner and all(callable(getattr(part, name, None)) for name in ("train", "eval")):
            found.append(part)
            inner.update(map(id, optimizers_in(part)))
    return found


def set_training(optimizer: torch.optim.Optimizer | None, training: bool) -> None:
    """Give the parameters the training or the averaged weights, if the optimizer has both."""
    for part in switching_optimizers(optimizer):
        if training:
            _train(part)
        else:
            _average(part)


@contextlib.contextmanager
def averaged_weights(
    optimizer: torch.optim.Optimizer | None, before_return: Callable[[], object] = lambda: None
) -> Iterator[None]:
    """Enter the context in which the parameters have the averaged weights, if the optimizer has any.

    The training weights come back bit-identical; meanwhile the optimizer's state has them too.

    Args:
        optimizer: The optimizer; None before a training.
        before_return: Called before the parameters get their training weights again.
    """
    parts = [part for part in switching_optimizers(optimizer) if _is_training(part)]
    if not parts:
        yield
        return
    for part in parts:
        for parameter, state in _parameter_states(part).items():
            state[_TRAINING_WEIGHTS] = parameter.detach().clone()
        _average(part)
    try:
        yield
        before_return()
    finally:
        for part in parts:
            _train(part)


def _train(optimizer: Any) -> None:
    """Give the parameters the training weights: those kept in the state, which may be a checkpoint's, if it has any."""
    optimizer.train()
    _switched[optimizer] = True
    for parameter, state in _parameter_states(optimizer).items():
        if (weights := state.pop(_TRAINING_WEIGHTS, None)) is not None:
            parameter.detach().copy_(weights)


def _average(optimizer: Any) -> None:
    optimizer.eval()
    _switched[optimizer] = False


def _is_training(optimizer: Any) -> bool:
    """Return whether the parameters have the training weights; some optimizers note it at their first switch only."""
    group: dict[str, Any] = optimizer.param_groups[0] if optimizer.param_groups else {}
    last = _switched.get(optimizer, True)
    is_training: bool = group.get("train_mode", getattr(optimizer, "train_mode", last))
    return is_training


def _parameter_states(optimizer: Any) -> dict[torch.Tensor, dict[Any, Any]]:
    """Return the state of each parameter that has one; the outermost of those that several optimizers keep."""
    found: dict[torch.Tensor, dict[Any, Any]] = {}
    for part in optimizers_in(optimizer):
        for parameter, state in state_of(part).items():
            if isinstance(parameter, torch.Tensor) and isinstance(state, dict) and state:
                found.setdefault(parameter, state)
    return found
