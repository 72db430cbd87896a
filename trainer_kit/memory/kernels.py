"""What operators take for themselves while they compute: no tensor of it comes out."""

from __future__ import annotations

import math
from typing import Any

import torch

_aten = torch.ops.aten
_BLOCK = 8  # channels
_NNPACK_BATCH = 16
"""Samples from which torch gives a convolution to NNPACK where oneDNN is switched off."""


def hidden_on_cpu(func: Any, args: Any, result: Any) -> int:
    """Bytes beyond its result that an operator holds on a CPU at once.

    Found with `torch.profiler` (`profile_memory`), which sees every allocation:

    - A convolution of oneDNN works on copies of image, weight and result in a blocked layout, and copies the result
      back.
    - One that oneDNN does not compute (another dtype, float16 or bfloat16 on a CPU without instructions for it, oneDNN
      switched off) unfolds the image into columns (im2col), unless NNPACK takes it.
    - The backward pass of oneDNN's LSTM copies its matrices and their gradients, and has those of its four gates.
    - The backward pass of batch norm makes one more image, unless all the gradients are one number that is repeated.

    Not counted are the blocks in which oneDNN computes products in half precision: their number and size depend on the
    processor, and they do not grow with the model.
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
    """Whether oneDNN wants the image in another layout; the few channels of a picture stay as they are."""
    return image.shape[1] >= _BLOCK


def _is_onednns(image: torch.Tensor) -> bool:
    """Whether oneDNN computes convolutions of this dtype on this processor."""
    if not (torch.backends.mkldnn.is_available() and torch._C._get_mkldnn_enabled()):
        return False
    if image.dtype is torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    if image.dtype is torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return image.dtype is torch.float32


def _unfolds(image: torch.Tensor) -> bool:
    """Whether torch's own convolution makes columns; NNPACK, which takes larger batches in float32, makes none."""
    return image.dtype is not torch.float32 or len(image) < _NNPACK_BATCH or not torch._nnpack_available()


def _columns(output: torch.Tensor, weight: torch.Tensor) -> int:
    """Of each place of the output, the patch of the image that it sees."""
    places = output.shape[0] * math.prod(output.shape[2:])
    return places * math.prod(weight.shape[1:]) * output.element_size()


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
