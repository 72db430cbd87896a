"""Memory that operators allocate internally while they compute, and that no tensor shows."""

from __future__ import annotations

import math
from typing import Any

import torch

_aten = torch.ops.aten
_BLOCK = 8  # channels
_NNPACK_BATCH = 16
"""Smallest number of samples for which torch uses NNPACK in a convolution with oneDNN disabled."""


def hidden_on_cpu(func: Any, args: Any, result: Any) -> int:
    """Return the peak bytes beyond its result that an operator holds on a CPU.

    Found with `torch.profiler` (`profile_memory`), which records every allocation:

    - A convolution of oneDNN works on copies of image, weight and result in a blocked layout, and copies the result
      back.
    - A convolution without oneDNN (another dtype, float16 or bfloat16 on a CPU without instructions for it, oneDNN
      disabled) unfolds the image into columns (im2col), unless NNPACK computes it.
    - The backward pass of oneDNN's LSTM copies its matrices and their gradients, and holds those of its four gates.
    - The backward pass of batch norm creates one more image, unless all gradients are one repeated number.

    Excluded are the blocks in which oneDNN computes products in half precision: their number and size depend on the
    processor, and they do not grow with the model.

    Args:
        func: The operator.
        args: Arguments of the operator.
        result: Result of the operator.
    """
    if func is _aten.convolution.default:
        image, weight = args[:2]
        if not _is_onednns(image):
            return _columns(result, weight) if _unfolds(image) else 0
        return max(_nbytes(result), _nbytes(weight) + (_nbytes(image) if _is_blocked(image) else 0))
    if func is _aten.convolution_backward.default:
        gradient, image, weight = args[:3]
        if not _is_onednns(image):
            return _columns(gradient, weight) if _unfolds(image) else 0
        return _nbytes(gradient) + (_nbytes(image) if _is_blocked(image) else 0)
    if func is _aten.mkldnn_rnn_layer_backward.default:
        of_inputs, of_state, output = args[1], args[2], args[7]
        return 2 * (_nbytes(of_inputs) + _nbytes(of_state)) + 4 * _nbytes(output)
    if func is _aten.native_batch_norm_backward.default:
        gradient, image = args[:2]
        return 0 if 0 in gradient.stride() else _nbytes(image)
    return 0


def _is_blocked(image: torch.Tensor) -> bool:
    """Return whether oneDNN copies the image into another layout; images with few channels stay unchanged."""
    return image.shape[1] >= _BLOCK


def _is_onednns(image: torch.Tensor) -> bool:
    """Return whether oneDNN computes convolutions of this dtype on this processor."""
    if not (torch.backends.mkldnn.is_available() and torch._C._get_mkldnn_enabled()):
        return False
    if image.dtype is torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    if image.dtype is torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return image.dtype is torch.float32


def _unfolds(image: torch.Tensor) -> bool:
    """Return whether torch's own convolution creates columns; NNPACK, for larger float32 batches, creates none."""
    return image.dtype is not torch.float32 or len(image) < _NNPACK_BATCH or not torch._nnpack_available()


def _columns(output: torch.Tensor, weight: torch.Tensor) -> int:
    """Return the bytes of the input patches for all output positions."""
    places = output.shape[0] * math.prod(output.shape[2:])
    return places * math.prod(weight.shape[1:]) * output.element_size()


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
