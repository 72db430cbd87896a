"""The gradients of an unfinished optimizer step, in checkpoints of an `Accelerator`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from trainer_kit.strategies.base import Strategy


def partial_gradients(strategy: Strategy, models: Sequence[torch.nn.Module]) -> dict[str, torch.Tensor]:
    """Return the gradients so far, summed over the processes. Collective."""
    named = _trained(strategy, models)
    held = strategy.collectives.all_reduce_ints([int(parameter.grad is not None) for _, parameter in named])
    summed = {}
    for (name, parameter), holders in zip(named, held, strict=True):
        if holders:
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            if not strategy.sharding.is_active:  # else the backward pass has summed it already
                gradient = strategy.collectives.all_reduce(gradient.to_dense())
                gradient = gradient.div_(_local_scale(strategy)) if _local_scale(strategy) > 1 else gradient
            summed[name] = gradient
    return summed


def restore_gradients(
    strategy: Strategy, models: Sequence[torch.nn.Module], gradients: Mapping[str, torch.Tensor]
) -> None:
    """Set the gradients to those that `partial_gradients` returned; the others to None."""
    for name, parameter in _trained(strategy, models):
        parameter.grad = None
        if name in gradients and strategy.sharding.is_active:
            parameter.grad = strategy.sharding.place_like(gradients[name], parameter)
        elif name in gradients and strategy.is_main:  # the next backward pass sums them over all processes
            parameter.grad = torch.empty_like(parameter).copy_(gradients[name]).mul_(_local_scale(strategy))


def _local_scale(strategy: Strategy) -> int:
    """Return the factor of gradients that are not summed over the processes yet, see `Strategy.backward`."""
    return 1 if strategy.sharding.is_active else strategy.world_size


def _trained(strategy: Strategy, models: Sequence[torch.nn.Module]) -> list[tuple[str, torch.Tensor]]:
    return [
        (f"{number}.{name}", parameter)
        for number, model in enumerate(models)
        for name, parameter in strategy.unwrap(model).named_parameters()
        if parameter.requires_grad
    ]
