"""Optimizer states in checkpoints: read after a check that they belong to the same parameters."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch

from trainer_kit.checkpoint.format.discovery import read_outline, read_state_into
from trainer_kit.errors import CheckpointError
from trainer_kit.utils.box import Placement
from trainer_kit.utils.optimizer_state import MODEL_NAME, described_groups
from trainer_kit.utils.parameter_order import follow_order

NEW_RUN = "start a new run with load_checkpoint_in_model(model, checkpoint)"
"""What to do, in errors, where a checkpoint does not fit the run."""


def read_optimizer_state(
    directory: Path,
    name: str,
    optimizer: torch.optim.Optimizer,
    names: Mapping[torch.Tensor, str],
    placement: Placement,
) -> dict[str, Any] | None:
    """Read an optimizer's state from a checkpoint; None if there is none of this name.

    The optimizer stays unchanged but for the order of parameters in its groups, which becomes the checkpoint's.

    Args:
        directory: Folder of the checkpoint.
        name: Name of the state.
        optimizer: The optimizer.
        names: The models' names of the parameters, as they were saved.
        placement: Returns the part of a parameter, or of a tensor that is sharded like it, that this process holds.
            State tensors of its shape are then sharded like it, and only their parts are read.

    Raises:
        CheckpointError: If the state is damaged.
        ValueError: If the state belongs to other parameters.
    """
    saved: dict[str, Any] | None = read_outline(directory, name)
    if saved is None:
        return None
    try:
        groups = described_groups(saved)
    except ValueError as error:
        raise CheckpointError(f"{directory} is damaged: {error}") from error
    _check_sizes(optimizer, groups, directory)
    follow_order(optimizer, names, groups, directory)
    _check_names(optimizer, {*names.values()}, groups, directory)
    _check_shapes(optimizer, saved, groups, directory)
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    targets: dict[tuple[Any, ...], torch.Tensor] = {
        ("state", number, key): torch.empty_like(parameter, dtype=value.dtype, requires_grad=False)
        for number, parameter in enumerate(parameters)
        if placement(parameter) is not None
        for key, value in saved["state"].get(number, {}).items()
        if isinstance(value, torch.Tensor) and value.shape == parameter.shape
    }
    state: dict[str, Any] | None = read_state_into(directory, name, targets, placement)
    return state


def _check_sizes(optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]], directory: Path) -> None:
    sizes = [[len(group["params"]) for group in each] for each in (optimizer.param_groups, groups)]
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"the optimizer has groups of {sizes[0]} parameters, but {directory} was made with {sizes[1]}; resume with "
            f"the same parameters frozen and the same weight_decay, or {NEW_RUN}"
        )


def _check_names(
    optimizer: torch.optim.Optimizer, known: Collection[str], groups: list[dict[str, Any]], directory: Path
) -> None:
    """Check the names that the optimizer was given, where the model's do not tell parameters apart."""
    for own, group in zip(optimizer.param_groups, groups, strict=True):
        names = own.get("param_names") or [None] * len(own["params"])
        for name, other in zip(names, group["params"], strict=True):
            if None not in (name, other["name"]) and name != other["name"] and other.get(MODEL_NAME) not in known:
                raise ValueError(
                    f"the optimizer has {name!r} where {directory} has {other['name']!r}; resume with the parameters "
                    f"in the same order, or {NEW_RUN}"
                )


def _check_shapes(
    optimizer: torch.optim.Optimizer, saved: Mapping[str, Any], groups: list[dict[str, Any]], directory: Path
) -> None:
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    described = [each for group in groups for each in group["params"]]
    for number, (parameter, other) in enumerate(zip(parameters, described, strict=True)):
        if [*parameter.shape] != other["shape"]:
            raise ValueError(
                f"the optimizer's parameter {number} is of shape {[*parameter.shape]}, but in {directory} of "
                f"{other['shape']}; resume with the parameters in the same order, or {NEW_RUN}"
            )
        if type(optimizer).__module__.startswith("torch.optim") and not isinstance(optimizer, torch.optim.LBFGS):
            _check_state_shapes(parameter, saved["state"].get(number, {}), number, directory)


def _check_state_shapes(parameter: torch.Tensor, state: Mapping[str, Any], number: int, directory: Path) -> None:
    """Check that each dimension of a state tensor is the parameter's or 1 (Adafactor's rows and columns)."""
    for name, value in state.items():
        if not isinstance(value, torch.Tensor) or value.ndim == 0:
            continue
        if value.ndim != parameter.ndim or any(
            size not in (1, of) for size, of in zip(value.shape, parameter.shape, strict=True)
        ):
            raise CheckpointError(
                f"{directory} is damaged: the {name!r} of the optimizer's parameter {number}, which is of shape "
                f"{[*parameter.shape]}, is of {[*value.shape]}"
            )
