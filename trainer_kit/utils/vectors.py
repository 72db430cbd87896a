"""Tensors as vectors, whose elements may be viewed as those of another dtype."""

from __future__ import annotations

import torch


def as_vector(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements of a strided tensor as a vector of stride 1, without a copy if the tensor is contiguous.

    torch calls a tensor of one element contiguous whatever its stride, but views it as another dtype only if that is 1.
    """
    vector = tensor.contiguous().reshape(-1)
    return vector if vector.stride(0) == 1 else vector.as_strided(vector.shape, (1,))


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a strided tensor as a vector of uint8, without a copy if the tensor is contiguous."""
    return as_vector(tensor.detach()).view(torch.uint8)
