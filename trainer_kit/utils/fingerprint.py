"""Fingerprints of the bits of tensors, computed on the tensors' own devices."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
import xxhash

from trainer_kit.utils.vectors import as_vector

_CHUNK = 2**20  # integers; the products of a chunk take 8 MiB
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32}


def fingerprints(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return a number for the bits of each tensor, with one transfer to the host per device.

    Dtype and shape do not count. A fingerprint on one device says nothing about those on another.

    Args:
        tensors: Dense tensors of any dtype.
    """
    found: dict[int, int] = {}
    by_device: dict[torch.device, dict[int, torch.Tensor]] = {}
    for place, tensor in enumerate(tensors):
        if tensor.device.type == "cpu":  # much faster there than the kernels of `fingerprint`
            content = _as_integers(tensor.detach()).view(torch.uint8).numpy().data
            found[place] = xxhash.xxh3_64_intdigest(content)
        else:
            by_device.setdefault(tensor.device, {})[place] = fingerprint(tensor)
    for sums in by_device.values():
        found |= zip(sums, torch.stack([*sums.values()]).tolist(), strict=True)
    return [found[place] for place in range(len(tensors))]


@torch.no_grad()
def fingerprint(tensor: torch.Tensor) -> torch.Tensor:
    """Return an int64 scalar on the tensor's device that differs for other bits, or bits in another order.

    Nothing waits for the device. A change of one element always changes the result; any other change does so but for
    a chance of about 2**-32.

    Args:
        tensor: A dense tensor of any dtype.
    """
    integers = _as_integers(tensor.detach())
    while True:
        sums: list[torch.Tensor] = [
            (chunk * _weights(integers.device, _CHUNK)[: chunk.numel()]).sum(dtype=torch.int64)
            for chunk in integers.split(_CHUNK)
        ]
        if len(sums) == 1:
            return sums[0]
        integers = torch.stack(sums).view(torch.int32)  # the order of the chunks counts too


def _as_integers(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's bits as a vector of integers of at most 32 bits, without a copy if it is contiguous."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    flat = as_vector(tensor.resolve_neg())
    is_aligned = flat.nbytes % 4 == 0 and flat.storage_offset() * flat.element_size() % 4 == 0
    return flat.view(torch.int32 if is_aligned else _INTEGERS[flat.element_size()])


@functools.cache
def _weights(device: torch.device, length: int) -> torch.Tensor:
    """Return the weight of each place in a chunk: odd, so that no change of one element is lost."""
    generator = torch.Generator().manual_seed(0)
    low, high = (torch.randint(0, 2**32, (length,), generator=generator) for _ in range(2))
    return (low << 32 | high | 1).to(device)
