"""Tied parameters: one parameter under several names."""

from __future__ import annotations

from collections.abc import Iterable

import torch


def names_by_parameter(model: torch.nn.Module) -> dict[torch.nn.Parameter, list[str]]:
    """Return all names of each parameter; tied parameters have several."""
    names: dict[torch.nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
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
