"""The order of an optimizer's parameters: its saved state numbers them by their places in the groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from trainer_kit.utils.optimizer_state import GROUPS, MODEL_NAME, optimizers_in


def add_model_names(
    state: Mapping[str, Any], optimizer: torch.optim.Optimizer, names: Mapping[torch.Tensor, str]
) -> None:
    """Add the model's names of the parameters to their descriptions in a state that `optimizer_state` returned.

    Parameters without a name in `names` get none; a state without descriptions stays as it is.
    """
    for group, described in zip(optimizer.param_groups, state.get(GROUPS, ()), strict=False):
        for parameter, each in zip(group["params"], described["params"], strict=True):
            if parameter in names:
                each[MODEL_NAME] = names[parameter]


def follow_order(
    optimizer: torch.optim.Optimizer,
    names: Mapping[torch.Tensor, str],
    groups: Sequence[Mapping[str, Any]],
    source: Any,
) -> None:
    """Bring the parameters in each group of an optimizer without state into the order of a saved one.

    Parameters whose names were not saved, and those that have none in `names`, keep their order.

    Args:
        optimizer: The optimizer, with as many parameters in each group as the saved one.
        names: The model's names of the parameters, as `Strategy.parameter_names` returns them.
        groups: Description of the saved groups.
        source: What holds the saved state, for errors.

    Raises:
        ValueError: If a group has another parameter of the model than the saved one, or an optimizer that consists of
            several has another order.
    """
    orders, known = [], set(names.values())
    for number, (group, described) in enumerate(zip(optimizer.param_groups, groups, strict=True)):
        own = [names.get(parameter) for parameter in group["params"]]
        saved = [name if (name := each.get(MODEL_NAME)) in known else None for each in described["params"]]
        orders.append(_order(own, saved, f"group {number} of the optimizer has %s where {source} has %s"))
    if all(order == sorted(order) for order in orders):
        return
    lists = {id(group["params"]) for group in optimizer.param_groups}
    if any(id(group["params"]) not in lists for part in optimizers_in(optimizer) for group in part.param_groups):
        raise ValueError(
            f"the {type(optimizer).__name__} consists of several optimizers, and has its parameters in another order "
            f"than in {source}; resume with the parameters in the same order"
        )
    for group, order in zip(optimizer.param_groups, orders, strict=True):
        for values in (group["params"], group.get("param_names")):
            if values is not None:
                values[:] = [values[place] for place in order]


def _order(own: list[str | None], saved: list[str | None], differs: str) -> list[int]:
    """Return the place of the own parameter for each saved one."""
    present, place_of = {*own}, {name: place for place, name in enumerate(saved) if name is not None}
    lost = [name for name in saved if name is not None and name not in present]
    if lost:
        name = next((name for name in own if name not in place_of), None)
        other = "a parameter that is not the model's" if name is None else repr(name)
        raise ValueError(
            f"{differs % (other, repr(lost[0]))}; resume with the same parameters in each group of the optimizer"
        )
    free = iter([place for place, name in enumerate(saved) if name is None])
    places = [place_of[name] if name in place_of else next(free, 0) for name in own]
    return sorted(range(len(own)), key=places.__getitem__)
