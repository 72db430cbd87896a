"""Sharded tensors: which part of the whole lies on this process, and how values reach it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Placement

from trainer_kit.strategies.ddp_module import pieces, tensor_bytes
from trainer_kit.utils.box import Box


def box_of(tensor: DTensor) -> Box:
    """Return the part of a sharded tensor that this process holds."""
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    assert coordinate is not None, "this process is in the mesh"
    return box_at(tuple(tensor.shape), tuple(mesh.shape), tuple(coordinate), tensor.placements)


def box_at(
    shape: tuple[int, ...], mesh_shape: tuple[int, ...], coordinate: tuple[int, ...], placements: Sequence[Placement]
) -> Box:
    """Return the part of a sharded tensor that the process at a coordinate of the mesh holds."""
    sizes, offsets = _compute_local_shape_and_global_offset(shape, mesh_shape, list(coordinate), placements)
    return Box(shape, tuple(map(min, offsets, shape)), tuple(sizes))


def part_at(box: Box, whole: torch.Tensor) -> torch.Tensor:
    """Return the view of a whole tensor that a box describes."""
    for dimension, (start, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
        whole = whole.narrow(dimension, start, size)
    return whole


@torch.no_grad()
def fill(tensor: torch.Tensor, whole: torch.Tensor) -> None:
    """Set a tensor, sharded or not, to the values of `whole`."""
    if isinstance(tensor, DTensor):
        tensor.to_local().copy_(part_at(box_of(tensor), whole))
    else:
        tensor.copy_(whole)


def sharded_like(tensor: DTensor, whole: torch.Tensor) -> torch.Tensor:
    """Return the values of `whole` as a tensor that is sharded like `tensor`; not collective."""
    sharded = torch.empty_like(tensor, dtype=whole.dtype, requires_grad=False)
    fill(sharded, whole)
    return sharded


def whole_tensors(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return tensors with each sharded one gathered on all processes; one that occurs twice is gathered once."""
    gathered: dict[int, torch.Tensor] = {}
    for value in tensors.values():
        if isinstance(value, DTensor) and id(value) not in gathered:
            with torch.no_grad():
                gathered[id(value)] = value.full_tensor()
    return {name: gathered.get(id(value), value) for name, value in tensors.items()}


def fill_from_main(tensors: Mapping[str, torch.Tensor], values: Mapping[str, torch.Tensor]) -> None:
    """Set tensors to the main process's values. Collective.

    Values are sent in pieces, so that a process holds its own parts and one piece.

    Args:
        tensors: Tensors to fill, sharded or not; the same names and whole shapes on all processes.
        values: The whole values on the host; only read on the main process.
    """
    is_alone = not dist.is_initialized()
    is_main = is_alone or dist.get_rank() == 0
    for names in pieces(tensors, lambda name: tensor_bytes(tensors[name])):
        sizes = [tensor_bytes(tensors[name]) for name in names]
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
