"""Memory formats of convolutions: channels last."""

from __future__ import annotations

from typing import Any

import torch

from trainer_kit.utils.pytree import map_tensors

_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}
"""Memory format by number of dimensions."""


def use_channels_last(model: torch.nn.Module) -> bool:
    """Lay out a model's weights and buffers of 4 and 5 dimensions in place; return whether there are such weights."""
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = in_channels_last(tensor.data)
    return any(parameter.ndim in _FORMATS for parameter in model.parameters())


def in_channels_last(tree: Any) -> Any:
    """Return nested containers with their floating-point tensors of 4 and 5 dimensions in channels last."""
    return map_tensors(_laid_out, tree)


def _laid_out(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.ndim not in _FORMATS or not tensor.is_floating_point():
        return tensor
    return tensor.contiguous(memory_format=_FORMATS[tensor.ndim])
