"""`ShardCollector`: sharded tensors on their way to the processes that own them, each one whole and on the host."""

from __future__ import annotations

import functools
import itertools
from collections import deque
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from trainer_kit.strategies.ddp_module import pieces, tensor_bytes
from trainer_kit.strategies.fsdp.placement import box_at, part_at
from trainer_kit.strategies.process_group import failed_to_communicate
from trainer_kit.utils.box import Box
from trainer_kit.utils.units import format_size
from trainer_kit.utils.vectors import as_bytes

BUNDLE_BYTES = 2**23
"""Bytes that an owner receives in one round; a larger tensor travels alone."""

Bundle = list[int]
"""Numbers of the tensors that one owner receives at the same time."""


class ShardCollector:
    """Sharded tensors on their way to their owners.

    Parts are sent in bundles, in rounds in which each owner receives one. All processes take part in all rounds: `take`
    as many as it needs, `finish` those that are left. A process holds one bundle that it receives, the tensors that
    it has not taken yet, and its parts of the bundles that it sends. A round needs no memory but that, which is
    allocated here, so that a process that lacks memory breaks off no round.

    Args:
        tensors: Sharded tensors, the same ones in the same order on all processes; only their layout is read.
        parts: This process's part of each.
        owners: Rank of each tensor's owner.
        device: Device on which parts are sent.
        group: Group that sends them; None: the default one.

    Attributes:
        is_waiting: Whether a thread waits for other processes.
    """

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        parts: Sequence[torch.Tensor],
        owners: Sequence[int],
        device: torch.device,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.is_waiting = False
        self._rank = dist.get_rank()
        self._tensors, self._parts, self._group = tensors, parts, group
        self._own: dict[int, deque[int]] = {}  # numbers by the tensor
        self._whole: dict[int, torch.Tensor] = {}  # own tensors that have arrived, or are about to
        for number, (tensor, owner) in enumerate(zip(tensors, owners, strict=True)):
            if owner == self._rank:
                self._own.setdefault(id(tensor), deque()).append(number)
        rounds = [*_rounds(tensors, owners)]
        sent = max((sum(map(sum, self._sends(each).values())) for each in rounds), default=0)
        received = max((sum(map(sum, self._receives(each).values())) for each in rounds), default=0)
        self._sent, self._received = (torch.empty(n, dtype=torch.uint8, device=device) for n in (sent, received))
        self._rounds = iter(rounds)

    def take(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return an own tensor, whole and on the host; each is there once.

        Raises:
            MemoryError: If the host lacks memory for it.
            OSError: If another process has left.
        """
        number = self._own[id(tensor)].popleft()
        if not tensor.numel():
            return _empty(tensor)
        while number not in self._whole:
            bundles = next(self._rounds)
            self._exchange(bundles)
            self._unpack(bundles)
        return self._whole.pop(number)

    def finish(self) -> None:
        """Take part in the rounds that are left, for the other processes.

        Raises:
            OSError: If another process has left.
        """
        self._whole.clear()
        for bundles in self._rounds:
            self._exchange(bundles)

    @torch.no_grad()
    def _exchange(self, bundles: dict[int, Bundle]) -> None:
        """Send this process's parts of each owner's bundle, and receive the parts of its own."""
        operations, start = list[dist.P2POp](), 0
        for owner, sizes in self._sends(bundles).items():
            begin = start
            for number, size in zip(self._numbers(bundles[owner], self._rank, owner), sizes, strict=True):
                part = as_bytes(self._parts[number])
                self._sent[start : start + size].copy_(part)
                start += size
            operations.append(dist.P2POp(dist.isend, self._sent[begin:start], owner, self._group))
        start = 0
        for sender, sizes in self._receives(bundles).items():
            operations.append(dist.P2POp(dist.irecv, self._received[start : start + sum(sizes)], sender, self._group))
            start += sum(sizes)
        self._run(operations)

    def _run(self, operations: list[dist.P2POp]) -> None:
        self.is_waiting = True
        try:
            for work in dist.batch_isend_irecv(operations) if operations else ():
                work.wait()
        except RuntimeError as error:
            self._rounds = iter(())
            if failed_to_communicate(error):
                raise OSError(f"another process left before it had sent its part ({error})") from error
            raise
        finally:
            self.is_waiting = False

    @torch.no_grad()
    def _unpack(self, bundles: dict[int, Bundle]) -> None:
        """Copy the parts of this process's bundle to their places."""
        bundle, start = bundles.get(self._rank, []), 0
        for number in bundle:
            self._whole[number] = _empty(self._tensors[number])
        for number in self._numbers(bundle, self._rank, self._rank):
            self._part_of(number, self._rank).copy_(self._parts[number])
        for sender, sizes in self._receives(bundles).items():
            for number, size in zip(self._numbers(bundle, sender, self._rank), sizes, strict=True):
                place = self._part_of(number, sender)
                # Cloned, since a view as another dtype needs an aligned start.
                content = self._received[start : start + size].clone().view(place.dtype)
                place.copy_(content.reshape(place.shape))
                start += size

    def _part_of(self, number: int, sender: int) -> torch.Tensor:
        return part_at(_senders(self._tensors[number], self._rank)[sender], self._whole[number])

    def _sends(self, bundles: dict[int, Bundle]) -> dict[int, list[int]]:
        """Return the bytes of this process's part of each tensor that it sends, by owner."""
        sizes = {owner: self._sizes(bundle, self._rank, owner) for owner, bundle in bundles.items()}
        return {owner: each for owner, each in sizes.items() if each and owner != self._rank}

    def _receives(self, bundles: dict[int, Bundle]) -> dict[int, list[int]]:
        """Return the bytes of each part that this process receives, by sender."""
        bundle = bundles.get(self._rank, [])
        senders = {sender for number in bundle for sender in _senders(self._tensors[number], self._rank)}
        return {sender: self._sizes(bundle, sender, self._rank) for sender in sorted(senders - {self._rank})}

    def _sizes(self, bundle: Bundle, sender: int, owner: int) -> list[int]:
        return [
            _senders(self._tensors[number], owner)[sender].numel * self._tensors[number].element_size()
            for number in self._numbers(bundle, sender, owner)
        ]

    def _numbers(self, bundle: Bundle, sender: int, owner: int) -> list[int]:
        """Return the numbers of the tensors of a bundle of which a process has a part."""
        return [number for number in bundle if sender in _senders(self._tensors[number], owner)]


def _rounds(tensors: Sequence[torch.Tensor], owners: Sequence[int]) -> Iterator[dict[int, Bundle]]:
    """Yield the bundle of each owner, by owner, for each round."""
    owned: dict[int, list[int]] = {}
    for number, owner in enumerate(owners):
        owned.setdefault(owner, []).append(number)
    bundles = {
        owner: pieces(numbers, lambda number: tensor_bytes(tensors[number]), BUNDLE_BYTES)
        for owner, numbers in owned.items()
    }
    for bundle_round in itertools.zip_longest(*bundles.values(), fillvalue=[]):
        yield dict(zip(bundles, bundle_round, strict=True))


def _senders(tensor: torch.Tensor, owner: int) -> dict[int, Box]:
    assert isinstance(tensor, DTensor)
    return _boxes(tensor.device_mesh, tensor.placements, tuple(tensor.shape), owner)


@functools.lru_cache(maxsize=2**14)
def _boxes(mesh: DeviceMesh, placements: tuple[Placement, ...], shape: tuple[int, ...], owner: int) -> dict[int, Box]:
    """Return the parts that make up the whole by rank, of the copy of the model that the owner belongs to."""
    ranks = mesh.mesh
    copied = [axis for axis, placement in enumerate(placements) if placement.is_replicate()]
    home = (ranks == owner).nonzero()[0].tolist()
    boxes = {}
    for coordinate in itertools.product(*map(range, ranks.shape)):
        if all(coordinate[axis] == home[axis] for axis in copied):
            box = box_at(shape, tuple(ranks.shape), coordinate, placements)
            if box.numel:
                boxes[int(ranks[coordinate])] = box
    return boxes


def _empty(tensor: torch.Tensor) -> torch.Tensor:
    try:
        return torch.empty(tensor.shape, dtype=tensor.dtype)
    except RuntimeError as error:
        raise MemoryError(f"no host memory for a whole tensor ({format_size(tensor_bytes(tensor))})") from error
