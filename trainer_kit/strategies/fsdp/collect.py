"""Collection of sharded tensors: each one whole, on the host of the process that writes it."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from trainer_kit.strategies.ddp_module import pieces, tensor_bytes
from trainer_kit.strategies.fsdp.placement import box_at, part_at
from trainer_kit.utils.box import Box

BUNDLE_BYTES = 2**24
"""Bytes that an owner receives in one round; a larger tensor travels alone."""

Bundle = list[int]
"""Numbers of the tensors that one owner receives at the same time."""


@torch.no_grad()
def collect(tensors: Sequence[torch.Tensor], owners: Sequence[int], places: Sequence[torch.Tensor | None]) -> None:
    """Copy whole tensors to their owners. Collective.

    Sharded tensors are sent in bundles, in rounds in which each owner receives one. A process holds one bundle that it
    receives and its parts of those that it sends.

    Args:
        tensors: Tensors, sharded or not; the same ones in the same order on all processes.
        owners: Rank of each tensor's owner.
        places: Host tensors for the copies; None for a tensor of another owner.
    """
    rank, sharded = dist.get_rank(), dict[int, Bundle]()  # by owner
    for number, (tensor, owner, place) in enumerate(zip(tensors, owners, places, strict=True)):
        if isinstance(tensor, DTensor):
            sharded.setdefault(owner, []).append(number)
        elif owner == rank and place is not None:
            place.copy_(tensor)
    bundles = {
        owner: [*pieces(numbers, lambda number: tensor_bytes(tensors[number]), BUNDLE_BYTES)]
        for owner, numbers in sharded.items()
    }
    for bundle_round in itertools.zip_longest(*bundles.values(), fillvalue=[]):
        _exchange(tensors, dict(zip(bundles, bundle_round, strict=True)), places)


def _exchange(
    tensors: Sequence[torch.Tensor], bundles: dict[int, Bundle], places: Sequence[torch.Tensor | None]
) -> None:
    """Send this process's parts of each owner's bundle, and receive the parts of its own."""
    rank, operations, received = dist.get_rank(), list[dist.P2POp](), dict[int, torch.Tensor]()
    for owner, bundle in bundles.items():
        if owner == rank:
            for sender, size in _bytes_from(tensors, bundle, owner).items():
                received[sender] = torch.empty(size, dtype=torch.uint8, device=_device(tensors, bundle))
                if sender != rank:
                    operations.append(dist.P2POp(dist.irecv, received[sender], sender))
        if rank in _bytes_from(tensors, bundle, owner):
            parts = [_local_bytes(tensors[number]) for number in bundle if rank in _senders(tensors[number], owner)]
            if owner == rank:
                torch.cat(parts, out=received[rank])
            else:
                operations.append(dist.P2POp(dist.isend, torch.cat(parts), owner))
    for work in dist.batch_isend_irecv(operations) if operations else ():
        work.wait()
    for sender, content in received.items():
        _unpack(content, sender, tensors, bundles[rank], places)


def _unpack(
    content: torch.Tensor,
    sender: int,
    tensors: Sequence[torch.Tensor],
    bundle: Bundle,
    places: Sequence[torch.Tensor | None],
) -> None:
    """Copy the parts of one sender to their places."""
    content, start = content.cpu(), 0
    for number in bundle:
        tensor, place = tensors[number], places[number]
        assert place is not None
        box = _senders(tensor, dist.get_rank()).get(sender)
        if box is None:
            continue
        size = box.numel * tensor.element_size()
        # Cloned, since a view as another dtype needs an aligned start.
        part = content[start : start + size].clone().view(tensor.dtype).reshape(box.sizes)
        part_at(box, place).copy_(part)
        start += size


def _bytes_from(tensors: Sequence[torch.Tensor], bundle: Bundle, owner: int) -> dict[int, int]:
    """Return the number of bytes that each sender has of a bundle."""
    sizes: dict[int, int] = {}
    for number in bundle:
        for sender, box in _senders(tensors[number], owner).items():
            sizes[sender] = sizes.get(sender, 0) + box.numel * tensors[number].element_size()
    return sizes


def _senders(tensor: torch.Tensor, owner: int) -> dict[int, Box]:
    assert isinstance(tensor, DTensor)
    return _boxes(tensor.device_mesh, tensor.placements, tuple(tensor.shape), owner)


@functools.lru_cache(maxsize=2**14)
def _boxes(mesh: DeviceMesh, placements: tuple[Placement, ...], shape: tuple[int, ...], owner: int) -> dict[int, Box]:
    """Return the parts that make up the whole by rank, of the copy of the model that the owner belongs to."""
    ranks = mesh.mesh
    copied = [axis for axis, placement in enumerate(placements) if not placement.is_shard()]
    home = (ranks == owner).nonzero()[0].tolist()
    boxes = {}
    for coordinate in itertools.product(*map(range, ranks.shape)):
        if all(coordinate[axis] == home[axis] for axis in copied):
            box = box_at(shape, tuple(ranks.shape), coordinate, placements)
            if box.numel:
                boxes[int(ranks[coordinate])] = box
    return boxes


def _local_bytes(tensor: torch.Tensor) -> torch.Tensor:
    assert isinstance(tensor, DTensor)
    return tensor.to_local().detach().contiguous().view(-1).view(torch.uint8)


def _device(tensors: Sequence[torch.Tensor], bundle: Bundle) -> torch.device:
    first = tensors[bundle[0]]
    assert isinstance(first, DTensor)
    return first.to_local().device
