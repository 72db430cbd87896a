"""Page-locked host memory for copies of many tensors, in a few slabs."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from trainer_kit.utils.pytree import strides_of_copy

ALIGNMENT = 64
"""Bytes to a multiple of which each tensor's place in a slab begins."""

SMALLEST = 2**16
"""Bytes of the smallest slab, unless all tensors together need less."""


def pinned_places(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return an uninitialized page-locked tensor for a copy of each tensor.

    torch rounds each page-locked allocation up to a power of two, so that single ones take up to twice the memory.
    Here tensors share slabs whose sizes are powers of two. A slab is freed with the last of its tensors.
    """
    sizes = [-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for tensor in tensors]
    slabs, starts = plan(sizes)
    memory = [torch.empty(size, dtype=torch.uint8, pin_memory=True) for size in slabs]
    places = []
    for tensor, (slab, start) in zip(tensors, starts, strict=True):
        if tensor.numel():
            flat = memory[slab][start : start + tensor.nbytes].view(tensor.dtype)
            places.append(flat.as_strided(tensor.shape, strides_of_copy(tensor)))
        else:
            places.append(empty_copy(tensor))
    return places


def empty_copy(tensor: torch.Tensor) -> torch.Tensor:
    """Return an uninitialized host tensor like another one; other strides would need a second copy on the device."""
    return torch.empty_strided(tensor.shape, strides_of_copy(tensor), dtype=tensor.dtype)


def release_pinned_memory() -> None:
    """Return page-locked memory that no tensor uses to the operating system."""
    release = getattr(torch.accelerator, "empty_host_cache", None)  # torch before 2.10 has a private name for it
    release = release or getattr(torch._C, "_host_emptyCache", None)
    if release is not None:
        release()


def plan(sizes: Sequence[int]) -> tuple[list[int], list[tuple[int, int]]]:
    """Divide tensors over slabs, the largest first, each into the first slab that has room.

    Args:
        sizes: Bytes of each tensor.

    Returns:
        Bytes of each slab, and for each tensor its slab and its place there.
    """
    slabs, used = list[int](), list[int]()
    starts = [(0, 0)] * len(sizes)
    remaining = sum(sizes)
    for number in sorted(range(len(sizes)), key=lambda each: -sizes[each]):
        size = sizes[number]
        if not size:
            break
        slab = next((each for each, full in enumerate(used) if slabs[each] - full >= size), len(slabs))
        if slab == len(slabs):
            slabs.append(_slab_bytes(size, remaining))
            used.append(0)
        starts[number] = slab, used[slab]
        used[slab] += size
        remaining -= size
    return slabs, starts


def _slab_bytes(size: int, remaining: int) -> int:
    """Return the size of a new slab for a tensor and those that follow, `remaining` bytes in all."""
    whole = _power_of_two(remaining)
    if whole <= SMALLEST or whole - remaining <= remaining // 16:
        return whole
    return max(_power_of_two(size), whole // 2)


def _power_of_two(size: int) -> int:
    """Return the smallest power of two that is not below `size`."""
    return 1 << (size - 1).bit_length()
