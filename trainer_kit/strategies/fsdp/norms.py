"""Norms of gradients that are sharded over processes."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from trainer_kit.strategies.grad_norms import GradientNorms, gradient_norms


def sharded_norms(parameters: list[torch.Tensor], grads: list[torch.Tensor]) -> GradientNorms:
    """Return the norms of the whole gradients, the same on all processes. Collective.

    Args:
        parameters: Parameters, sharded or not.
        grads: This process's part of each gradient.
    """
    each = gradient_norms(parameters, grads).each
    groups: dict[dist.ProcessGroup, list[int]] = {}
    for index, parameter in enumerate(parameters):
        if isinstance(parameter, DTensor):
            for axis, placement in enumerate(parameter.placements):
                if not placement.is_replicate():
                    groups.setdefault(parameter.device_mesh.get_group(axis), []).append(index)
    for group, indices in groups.items():
        squares = each[indices].double().square()
        dist.all_reduce(squares, group=group)
        each[indices] = squares.sqrt().to(each.dtype)
    return GradientNorms(each, torch.linalg.vector_norm(each), parameters)
