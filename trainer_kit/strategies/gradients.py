"""The numbers of gradients, and their norms."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch


class GradientNorms(NamedTuple):
    """2-norms of gradients, on their device.

    Attributes:
        each: One a gradient, in the optimizer's order, shape [gradients].
        total: That of all together, a scalar.
        parameters: Whose gradients they are.
        held: Whether weights and optimizer stay as they are from a step on whose norm is not finite.
    """

    each: torch.Tensor
    total: torch.Tensor
    parameters: list[torch.Tensor]
    held: bool = False


def gradient_norms(parameters: list[torch.Tensor], grads: list[torch.Tensor]) -> GradientNorms:
    """The norms of `grads`, which are those of `parameters`."""
    norms: Any = torch._foreach_norm(grads)
    if len({norm.dtype for norm in norms}) > 1:
        norms = [norm.float() for norm in norms]
    each = torch.stack(norms)
    return GradientNorms(each, torch.linalg.vector_norm(each), parameters)


def gradient_values(parameter: torch.Tensor) -> torch.Tensor:
    """The numbers of a gradient; of a sparse one (`Embedding(sparse=True)`) those that are there, each row once."""
    gradient = parameter.grad
    assert gradient is not None
    if gradient.is_sparse:
        gradient = parameter.grad = gradient.coalesce()
        return gradient.values()
    return gradient
