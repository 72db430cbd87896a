"""Optimizers that were made before their parameters were sharded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from trainer_kit.strategies.fsdp.placement import sharded_like
from trainer_kit.utils.pytree import map_tensors, tensors

_REFUSED = {
    "Adafactor": "computes with whole matrices",
    "AdamWScheduleFree": "switches whole weights between training and evaluation",
    "SGDScheduleFree": "switches whole weights between training and evaluation",
    "Muon": "computes with whole matrices",
    "AdamW8bit": "keeps blocks of states that span the parts of a matrix",
    "LBFGS": "joins all parameters in one vector",
    "SparseAdam": "needs sparse gradients",
    "Rprop": "writes to single elements of whole gradients",
}
"""Optimizers that fail or step wrongly on sharded parameters, and why."""


def shard_optimizer(optimizer: torch.optim.Optimizer, sharded: Mapping[torch.Tensor, Any]) -> None:
    """Give an optimizer the sharded parameters in place of those that it was made with.

    A state that its `__init__` filled, as Adagrad's does, is made of the same values on the shards.

    Args:
        optimizer: The optimizer, changed in place.
        sharded: The sharded parameter for each that `prepare` replaced.

    Raises:
        ValueError: If the optimizer has taken steps already, or cannot step on sharded parameters.
    """
    name = type(optimizer).__name__.removeprefix("Unscaled")  # ours of optim="adafactor"
    if name in _REFUSED:
        raise ValueError(f"{name} {_REFUSED[name]}, which FSDP shards; use AdamW, Adam or SGD")
    early = {parameter: state for parameter, state in optimizer.state.items() if parameter in sharded}
    if not all(map(_is_constant, tensors([*early.values()]))):
        raise ValueError(
            f"{name} has a state of the parameters before they were sharded; make it without taking steps, or "
            "after prepare()"
        )
    for parameter, state in early.items():
        del optimizer.state[parameter]
        optimizer.state[sharded[parameter]] = _placed(state, parameter, sharded[parameter])
    for group in optimizer.param_groups:
        group["params"] = [sharded.get(parameter, parameter) for parameter in group["params"]]


def _placed(state: Any, parameter: torch.Tensor, target: Any) -> Any:
    """Return a state with the tensors of the parameter's shape sharded like it."""
    return map_tensors(lambda each: sharded_like(target, each) if each.shape == parameter.shape else each, state)


def _is_constant(tensor: torch.Tensor) -> bool:
    """Return whether all elements are the same, as a state that no step has changed has them."""
    return not tensor.is_meta and (not tensor.numel() or bool((tensor == tensor.flatten()[0]).all()))
