"""Layers of bitsandbytes that pack their weights for inference on a CPU."""

from __future__ import annotations

import torch

_PACKS = "support_avx512bf16_for_cpu"
"""Attribute of a `Linear4bit` of bitsandbytes: whether it packs its weights."""


def keep_unpacked(model: torch.nn.Module) -> None:
    """Keep 4-bit layers of bitsandbytes in the format that they are trained in.

    On processors with AVX512-BF16, such a layer packs its weights in its first forward pass in evaluation mode. From
    then on it passes no gradient to its input, also in training mode, and its scales are rounded to bfloat16.
    """
    for module in model.modules():
        if getattr(module, _PACKS, False):
            setattr(module, _PACKS, False)
