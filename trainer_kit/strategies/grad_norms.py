"""Gradient values and norms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

_HALF = (torch.float16, torch.bfloat16)


class GradientNorms(NamedTuple):
    """2-norms of gradients, on their device.

    Attributes:
        each: Norm of each gradient, in the optimizer's order, shape [gradients].
        total: Norm of all gradients together, a scalar.
        parameters: The parameters of the gradients.
        held: Whether weights and optimizer stay unchanged from the first step with a non-finite norm on.
    """

    each: torch.Tensor
    total: torch.Tensor
    parameters: list[torch.Tensor]
    held: bool = False


def gradient_norms(parameters: list[torch.Tensor], grads: list[torch.Tensor]) -> GradientNorms:
    """Return the norms of `grads`, the gradients of `parameters`; half-precision norms are computed in float32."""
    dtypes = {grad.dtype for grad in grads}
    if len(dtypes) == 1:
        norms = _norms(grads)
    else:  # one fused call for each dtype
        found = {dtype: iter(_norms([grad for grad in grads if grad.dtype == dtype])) for dtype in dtypes}
        norms = tuple(next(found[grad.dtype]) for grad in grads)
    each = torch.stack(norms)
    return GradientNorms(each, torch.linalg.vector_norm(each), parameters)


def _norms(grads: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    return torch._foreach_norm(grads, 2, torch.float32 if grads[0].dtype in _HALF else None)


def clip_to_norm(grads: list[torch.Tensor], total: torch.Tensor, max_norm: float, value: Any = None) -> None:
    """Scale gradients in place by max_norm / (total + 1e-6), at most 1, as in torch.nn.utils.clip_grad_norm_.

    Args:
        grads: The gradients.
        total: Their norm.
        max_norm: Largest norm.
        value: The norm as a number, if the host knows it: gradients below `max_norm` are left as they are.
    """
    # The margin exceeds all rounding errors of the factor, so that a factor that is left out would be exactly 1.
    if isinstance(value, float) and value + 1e-6 < max_norm * (1 - 1e-6):
        return
    torch._foreach_mul_(grads, (total + 1e-6).reciprocal_().mul_(max_norm).clamp_(max=1.0))


def gradient_values(parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the parameters' gradients; coalesce sparse ones in place, and return their values."""
    grads: list[Any] = [parameter.grad for parameter in parameters]
    for number, grad in enumerate(grads):
        if grad.is_sparse:
            grads[number] = parameters[number].grad = grad.coalesce()
            grads[number] = grads[number].values()
    return grads
