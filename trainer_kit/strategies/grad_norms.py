"""The numbers of gradients, and their norms."""

from __future__ import annotations

from typing import NamedTuple

import torch

_HALF = (torch.float16, torch.bfloat16)


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
    """The norms of `grads`, which are those of `parameters`; of half precision in float32, as it would round them."""
    dtypes = {grad.dtype for grad in grads}
    if len(dtypes) == 1:
        norms = _norms(grads)
    else:  # a list of one dtype is computed in one go
        found = {dtype: iter(_norms([grad for grad in grads if grad.dtype == dtype])) for dtype in dtypes}
        norms = tuple(next(found[grad.dtype]) for grad in grads)
    each = torch.stack(norms)
    return GradientNorms(each, torch.linalg.vector_norm(each), parameters)


def _norms(grads: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """The norms of gradients of one dtype."""
    return torch._foreach_norm(grads, 2, torch.float32 if grads[0].dtype in _HALF else None)


def gradient_values(parameter: torch.Tensor) -> torch.Tensor:
    """The numbers of a gradient; of a sparse one (`Embedding(sparse=True)`) those that are there, each row once."""
    gradient = parameter.grad
    assert gradient is not None
    if gradient.is_sparse:
        gradient = parameter.grad = gradient.coalesce()
        return gradient.values()
    return gradient
