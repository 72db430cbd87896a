"""The cross entropy of a linear layer's output, in chunks of rows, without the whole output in memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional

Change = Callable[[torch.Tensor], torch.Tensor]

LEAST_ROWS = 256
"""Rows of a chunk at least: matrix products of fewer rows leave a GPU idle."""


def linear_cross_entropy_sum(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    *,
    ignore_index: int = -100,
    changes: Sequence[Change] = (),
    rows: int | None = None,
) -> torch.Tensor:
    """Return the sum of the cross entropies of `linear(hidden, weight, bias)` against `targets`.

    The forward pass computes the gradients too, chunk by chunk: no more than one chunk of logits is in memory, and
    none is computed twice. Gradients of the weight are summed in float32 at least. The method is that of Liger's
    `LigerFusedLinearCrossEntropyFunction` (https://arxiv.org/abs/2410.10989, section 3.2). In contrast to it, the
    gradients are those of the sum until the backward pass, since those of a mean are too small for float16.

    Args:
        hidden: Inputs of the layer, of shape [rows, width].
        weight: The layer's weight, of shape [classes, width].
        bias: The layer's bias, of shape [classes]; None without one.
        targets: Classes, of shape [rows].
        ignore_index: Target of rows that do not count.
        changes: Elementwise functions of the logits, applied in order.
        rows: Rows of a chunk; None: as many as make its logits as large as `hidden`, but at least `LEAST_ROWS`.

    Returns:
        The sum, a scalar in float32, or in float64 if the logits are.
    """
    if rows is None:
        rows = max(LEAST_ROWS, math.ceil(hidden.numel() / len(weight)))
    if not torch.is_grad_enabled():  # autograd asks for gradients of inputs that require them even then
        hidden, weight, bias = hidden.detach(), weight.detach(), None if bias is None else bias.detach()
    # Under autocast, the layer computes in the lower precision, and autograd returns gradients in the weight's.
    kind = hidden.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    result: torch.Tensor = _ChunkedSum.apply(hidden, weight, bias, targets, ignore_index, tuple(changes), rows, dtype)  # type: ignore[no-untyped-call]
    return result


class _ChunkedSum(torch.autograd.Function):
    """The function behind `linear_cross_entropy_sum`; `dtype` is autocast's, None without autocast."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        ignore_index: int,
        changes: tuple[Change, ...],
        rows: int,
        dtype: torch.dtype | None,
    ) -> torch.Tensor:
        trained = ctx.needs_input_grad[:3]
        into_hidden = torch.empty_like(hidden) if trained[0] else None
        into_weight, into_bias = (
            torch.zeros_like(each, dtype=_exact(each.dtype)) if each is not None and needed else None
            for each, needed in zip((weight, bias), trained[1:], strict=True)
        )
        ctx.gradients, ctx.dtypes = (into_hidden, into_weight, into_bias), (hidden.dtype, weight.dtype, weight.dtype)
        matrix, offset = _cast(weight, dtype), None if bias is None else _cast(bias, dtype)
        total = hidden.new_zeros((), dtype=_exact(hidden.dtype))
        with torch.autocast(hidden.device.type, enabled=False):
            for start in range(0, len(hidden), rows):
                chunk = slice(start, start + rows)
                inputs = _cast(hidden[chunk], dtype)
                logits = functional.linear(inputs, matrix, offset)
                loss, into_logits = _loss_and_gradient(logits, targets[chunk], ignore_index, changes, any(trained))
                total += loss
                del logits
                if into_logits is None:
                    continue
                if into_hidden is not None:
                    into_hidden[chunk] = into_logits @ matrix
                if into_weight is not None:
                    _add_product(into_weight, into_logits.t(), inputs)
                if into_bias is not None:
                    into_bias += into_logits.sum(0, dtype=into_bias.dtype)
        return total

    @staticmethod
    def backward(ctx: Any, factor: torch.Tensor) -> Any:
        gradients, ctx.gradients = ctx.gradients, None  # scaled in place below, and therefore of use only once
        if gradients is None or torch.is_grad_enabled():
            raise RuntimeError("a chunked cross entropy has one backward pass, and no gradient of its gradient")
        scaled = (
            None if each is None else each.mul_(factor).to(dtype)
            for each, dtype in zip(gradients, ctx.dtypes, strict=True)
        )
        return *scaled, None, None, None, None, None


def _loss_and_gradient(
    logits: torch.Tensor, targets: torch.Tensor, ignore_index: int, changes: Sequence[Change], trained: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the sum of a chunk's cross entropies, and its gradient with respect to the logits if `trained`."""
    logits = logits.detach().requires_grad_(trained)
    with torch.set_grad_enabled(trained):
        changed = logits
        for change in changes:
            changed = change(changed)
        exact = changed.to(_exact(changed.dtype))  # as transformers' ForCausalLMLoss does, but it cuts float64 too
        loss = functional.cross_entropy(exact, targets, ignore_index=ignore_index, reduction="sum")
    return loss.detach(), torch.autograd.grad(loss, logits)[0] if trained else None


def _add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """Add a matrix product to `total`, without a copy of it where the dtypes are equal."""
    if total.dtype == left.dtype:
        torch.addmm(total, left, right, out=total)
    else:
        total += left @ right


def _exact(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _cast(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """Cast to autocast's dtype, which leaves float64 as it is."""
    return tensor if dtype is None or tensor.dtype is torch.float64 else tensor.to(dtype)
