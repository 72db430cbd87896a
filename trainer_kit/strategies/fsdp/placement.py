"""Sharded tensors: which part of the whole lies on this process, and how values reach it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from trainer_kit.strategies.ddp_module import PIECE_BYTES
from trainer_kit.utils.box import Box


def box_of(tensor: DTensor) -> Box:
    """Return the part of a sharded tensor that this process holds."""
    sizes, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    inside = tuple(min(start, of) for start, of in zip(offsets, tensor.shape, strict=True))
    return Box(tuple(tensor.shape), inside, tuple(sizes))


@torch.no_grad()
def fill(tensor: torch.Tensor, whole: torch.Tensor) -> None:
    """Set a tensor, sharded or not, to the values of `whole`."""
    if isinstance(tensor, DTensor):
        box = box_of(tensor)
        for dimension, (start, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
            whole = whole.narrow(dimension, start, size)
        tensor.to_local().copy_(whole)
    else:
        tensor.copy_(whole)


def fill_from_main(tensors: Mapping[str, torch.Tensor], values: Mapping[str, torch.Tensor]) -> None:
    """Set tensors to the main process's values. Collective.

    Values are sent in pieces, so that a process holds its own parts and one piece.

    Args:
        tensors: Tensors to fill, sharded or not; the same names and whole shapes on all processes.
        values: The whole values on the host; only read on the main process.
    """
    is_alone = not dist.is_initialized()
    is_main = is_alone or dist.get_rank() == 0
    for names in _pieces(tensors):
        sizes = [tensors[name].numel() * tensors[name].element_size() for name in names]
        if is_main:
            packed = torch.cat(
                [values[name].detach().cpu().contiguous().reshape(-1).view(torch.uint8) for name in names]
            )
        else:
            packed = torch.empty(sum(sizes), dtype=torch.uint8)
        if not is_alone:
            dist.broadcast(packed, 0)
        for name, part in zip(names, packed.split(sizes), strict=True):
            # Cloned, since a view as another dtype needs an aligned start.
            fill(tensors[name], part.clone().view(tensors[name].dtype).reshape(tensors[name].shape))


def whole_tensors(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tensors with each sharded one gathered on the host; one that occurs twice is gathered once."""
    gathered: dict[int, torch.Tensor] = {}
    for value in tree.values():
        if isinstance(value, DTensor) and id(value) not in gathered:
            with torch.no_grad():
                gathered[id(value)] = value.full_tensor().cpu()
    return {name: gathered.get(id(value), value) for name, value in tree.items()}


def _pieces(tensors: Mapping[str, torch.Tensor]) -> Iterator[Sequence[str]]:
    names: list[str] = []
    size = 0
    for name, tensor in tensors.items():
        nbytes = tensor.numel() * tensor.element_size()
        if not nbytes:
            continue
        if names and size + nbytes > PIECE_BYTES:
            yield names
            names, size = [], 0
        names.append(name)
        size += nbytes
    if names:
        yield names
