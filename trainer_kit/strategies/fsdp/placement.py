"""Sharded tensors: which part of the whole lies on this process, and how values reach it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement, Replicate

from trainer_kit.strategies.ddp_module import pieces, tensor_bytes
from trainer_kit.utils.box import Box
from trainer_kit.utils.vectors import as_bytes


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
    offsets, sizes = [0] * len(shape), list(shape)
    # `fully_shard` divides the part that the axis "tensor", the innermost, has left of a tensor.
    for placement, processes, number in [*zip(placements, mesh_shape, coordinate, strict=True)][::-1]:
        if not placement.is_replicate():
            dimension: int = placement.dim  # type: ignore[attr-defined]
            most = -(-sizes[dimension] // processes)
            start = min(most * number, sizes[dimension])
            offsets[dimension] += start
            sizes[dimension] = min(most, sizes[dimension] - start)
    return Box(shape, tuple(offsets), tuple(sizes))


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
            gathered[id(value)] = gather(value)
    return {name: gathered.get(id(value), value) for name, value in tensors.items()}


@torch.no_grad()
def gather(tensor: DTensor) -> torch.Tensor:
    """Return a sharded tensor, whole on all processes. Collective."""
    placements = [*tensor.placements]
    for axis in range(len(placements)):  # one by one: torch warns where several axes divide one dimension
        placements[axis] = Replicate()
        tensor = tensor.redistribute(placements=placements)
    return tensor.to_local()


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
            packed = torch.cat([as_bytes(values[name].cpu()) for name in names])
        else:
            packed = torch.empty(sum(sizes), dtype=torch.uint8)
        if not is_alone:
            dist.broadcast(packed, 0)
        for name, part in zip(names, packed.split(sizes), strict=True):
            # Cloned, since a view as another dtype needs an aligned start.
            fill(tensors[name], part.clone().view(tensors[name].dtype).reshape(tensors[name].shape))
