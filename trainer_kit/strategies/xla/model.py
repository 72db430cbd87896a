"""Preparation of a model for XLA: dtypes and traced masks."""

from __future__ import annotations

import sys
from typing import Any

import torch

DOWNCAST = {torch.float32: torch.bfloat16, torch.float64: torch.float32}
"""Dtypes that `downcast_bf16` casts, as XLA_DOWNCAST_BF16 did."""


def downcast_module(model: torch.nn.Module) -> torch.nn.Module:
    """Cast a model's parameters and buffers in place as `DOWNCAST` says, and return the model."""
    casted: torch.nn.Module = model._apply(lambda tensor: tensor.to(DOWNCAST.get(tensor.dtype, tensor.dtype)))
    return casted


def let_transformers_trace() -> None:
    """Make transformers treat XLA's tensors as traced.

    Otherwise its models read in each forward pass whether the attention mask is all ones. That would wait for the
    device, and the result would select between two graphs.
    """
    masking: Any = sys.modules.get("transformers.masking_utils")
    known = getattr(masking, "is_tracing", None)
    if known is None or hasattr(known, "of_xla"):
        return

    def is_tracing(tensor: Any = None) -> bool:
        return known(tensor) or (isinstance(tensor, torch.Tensor) and tensor.device.type == "xla")

    is_tracing.of_xla = True  # type: ignore[attr-defined]
    masking.is_tracing = is_tracing
