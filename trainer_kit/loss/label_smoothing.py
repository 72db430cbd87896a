"""Label smoothing of the loss that a model computes from its logits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.nn import functional

from trainer_kit.loss.batch import IGNORED, is_whole


def smoothed_loss(output: Any, labels: torch.Tensor | None, factor: float, shifts: bool) -> torch.Tensor:
    """Return the mean cross entropy of a model's logits against smoothed labels, without labels of -100.

    A label becomes the distribution `(1 - factor) * one_hot + factor / classes` (https://arxiv.org/abs/1512.00567). The
    loss replaces the model's own, auxiliary terms included.

    Args:
        output: The model's output, with `logits` of shape [..., classes]: an attribute, a key, or the tensor after the
            loss in a tuple.
        labels: Whole numbers, of the logits' shape without classes.
        factor: Share of the uniform distribution.
        shifts: Whether the logits at one place predict the label at the next.

    Raises:
        ValueError: If there are no such logits and labels.
    """
    logits = _logits(output)
    if logits is None or labels is None or not is_whole(labels) or labels.shape != logits.shape[:-1]:
        has = "no logits" if logits is None else f"logits of shape {[*logits.shape]}"
        given = "no labels" if labels is None else f"labels of shape {[*labels.shape]} in {labels.dtype}"
        raise ValueError(
            f"label_smoothing_factor={factor} needs logits of shape [..., classes] and whole labels of their shape "
            f"without classes, but there are {has} and {given}; set it to 0.0, or give compute_loss="
        )
    if shifts:
        logits, labels = logits[..., :-1, :], labels[..., 1:]
    return functional.cross_entropy(
        logits.reshape(-1, logits.shape[-1]).to(torch.promote_types(logits.dtype, torch.float32)),
        labels.reshape(-1).to(logits.device),
        ignore_index=IGNORED,
        label_smoothing=factor,
    )


def _logits(output: Any) -> torch.Tensor | None:
    if isinstance(output, Mapping):
        found = output.get("logits")
    elif isinstance(output, (tuple, list)) and not hasattr(output, "logits"):
        found = output[1] if len(output) > 1 else None
    else:
        found = getattr(output, "logits", None)
    return found if isinstance(found, torch.Tensor) and found.ndim > 0 else None
