"""The numbers of gradients, and their norms."""

from __future__ import annotations

from collections.abc import Iterator
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
    are_half = [grad.dtype in _HALF for grad in grads]
    half = _norms([grad for grad, is_half in zip(grads, are_half, strict=True) if is_half], torch.float32)
    others = _norms([grad for grad, is_half in zip(grads, are_half, strict=True) if not is_half])
    norms = [next(half if is_half else others) for is_half in are_half]
    if len({norm.dtype for norm in norms}) > 1:
        norms = [norm.float() for norm in norms]
    each = torch.stack(norms)
    return GradientNorms(each, torch.linalg.vector_norm(each), parameters)


def _norms(grads: list[torch.Tensor], dtype: torch.dtype | None = None) -> Iterator[torch.Tensor]:
    return iter(torch._foreach_norm(grads, 2, dtype) if grads else ())


def gradient_values(parameter: torch.Tensor) -> torch.Tensor:
    """The numbers of a gradient; of a sparse one (`Embedding(sparse=True)`) those that are there, each row once."""
    gradient = parameter.grad
    assert gradient is not None
    if gradient.is_sparse:
        gradient = parameter.grad = gradient.coalesce()
        return gradient.values()
    return gradient
