"""Tied parameters: one parameter under several names."""

from __future__ import annotations

from collections.abc import Iterable

import torch


def parameters_by_all_names(model: torch.nn.Module) -> list[tuple[str, torch.nn.Parameter]]:
    """Return each parameter with its name; tied parameters have several.

    A class may override `named_parameters` without its option for this, as torchrl's losses do.
    """
    try:
        return [*model.named_parameters(remove_duplicate=False)]
    except TypeError:
        return [*torch.nn.Module.named_parameters(model, remove_duplicate=False)]


def names_by_parameter(model: torch.nn.Module) -> dict[torch.nn.Parameter, list[str]]:
    """Return all names of each parameter; tied parameters have several."""
    names: dict[torch.nn.Parameter, list[str]] = {}
    for name, parameter in parameters_by_all_names(model):
        names.setdefault(parameter, []).append(name)
    return names


def tie_again(model: torch.nn.Module, groups: Iterable[list[str]]) -> None:
    """Tie parameters again that were tied before a move.

    Args:
        model: The moved model, changed in place.
        groups: Names of each parameter; the first one's parameter replaces those of the others.
    """
    for first, *others in groups:
        parameter = model.get_parameter(first)
        for name in others:
            place, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(place), attribute, parameter)
