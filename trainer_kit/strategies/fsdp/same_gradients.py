"""`SameGradients`: a check in the first steps that gradients agree over the axis "tensor"."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from trainer_kit.strategies.collectives import Collectives

_TOLERANCE = 2e-2
"""Relative difference that rounding explains, in half precision too."""


class SameGradients:
    """A check that parameters that are not split have one gradient on all processes of a tensor group.

    A parameter that is used between split modules has a part of its gradient on each process. Each parameter is
    checked in the first step in which its gradient is finite and not zero.

    Args:
        collectives: The collectives of the run.
        group: The processes that read the same batches.
    """

    def __init__(self, collectives: Collectives, group: dist.ProcessGroup) -> None:
        self._collectives = collectives
        self._group = group
        self._checked: set[str] = set()
        self._losses: list[torch.Tensor] = []

    def record_loss(self, loss: torch.Tensor) -> None:
        """Record the loss of a backward pass until it has been compared."""
        if "" not in self._checked:
            self._losses.append(loss.detach())

    def check(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """Compare losses and gradients that have not been compared yet. Collective.

        Raises:
            ValueError: If one differs; the message names the parameter. Raised on all processes.
        """
        values = {"": torch.stack(self._losses).sum()} if self._losses else {}
        values |= {name: gradient for name, gradient in _whole_gradients(parameters) if name not in self._checked}
        self._losses.clear()
        if not values:
            return
        numbers = torch.stack([_difference(value, self._group) for value in values.values()])
        for name, (difference, norm) in zip(values, self._collectives.all_reduce(numbers, "max").tolist(), strict=True):
            if difference > _TOLERANCE * norm:
                raise ValueError(_described(name))
            if norm > 0:
                self._checked.add(name)


def _described(name: str) -> str:
    if not name:
        return (
            "the loss differs between processes that read the same batches: a 'colwise' module needs a 'rowwise' "
            "module after it, and dataset and collator must not depend on the rank; change tensor_parallel, or these"
        )
    return (
        f"tensor_parallel: the gradient of {name!r} differs between processes that read the same batches, since each "
        "uses it for its part only; give its module the style 'replicated_with_grad_allreduce', or split other modules"
    )


def _whole_gradients(parameters: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield this process's gradients of the parameters that are not split over the axis "tensor"."""
    for name, parameter in parameters.items():
        gradient = parameter.grad
        if isinstance(gradient, DTensor) and gradient.placements[-1].is_replicate():
            yield name, gradient.to_local()


def _difference(value: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return the norms of a tensor's difference from the mean over a group, and of the tensor; shape [2]."""
    value = value.detach().to(torch.float32)
    mean = value.clone()
    dist.all_reduce(mean, group=group)
    mean /= dist.get_world_size(group)
    norms = torch.stack([torch.linalg.vector_norm(value - mean), torch.linalg.vector_norm(value)])
    return norms.nan_to_num(0.0, posinf=0.0, neginf=0.0)
