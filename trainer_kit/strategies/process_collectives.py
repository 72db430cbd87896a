"""`ProcessCollectives`: collectives of several processes through `torch.distributed`."""

from __future__ import annotations

import contextlib
import pickle
import uuid
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
import xxhash

from trainer_kit.strategies import vote
from trainer_kit.strategies.collectives import Collectives
from trainer_kit.strategies.connections import Connections
from trainer_kit.strategies.peer_channel import PeerChannel
from trainer_kit.strategies.process_group import ProcessGroup
from trainer_kit.strategies.vote import RingVote, Vote

T = TypeVar("T")
# Kept, so that no thread of the group frees the last ones while the process ends: see `ddp.shut_down`.
_recent_numbers: deque[list[torch.Tensor]] = deque(maxlen=8)


class ProcessCollectives(Collectives):
    """Collectives of the processes that a launcher started.

    Args:
        group: The process group, joined before the first collective.

    Attributes:
        hosts: Host names by rank, for errors; empty if all processes run on one machine.
    """

    def __init__(self, group: ProcessGroup) -> None:
        place = group.place
        super().__init__(place.rank, place.local_rank, place.world_size)
        self.group = group
        self.hosts: list[str] = []

    def take_place(self) -> None:
        """Take the place that the group has now."""
        place = self.group.place
        self.rank, self.local_rank, self.world_size = place.rank, place.local_rank, place.world_size
        self.hosts = []

    @property
    def backend(self) -> str | None:
        return None if self.is_alone else dist.get_backend()

    @property
    def is_alone(self) -> bool:
        return self.group.is_alone

    @property
    def is_main(self) -> bool:
        return self.rank == 0 and not self.group.is_newcomer

    def describe_rank(self, rank: int) -> str:
        return f"rank {rank} ({self.hosts[rank]})" if self.hosts else f"rank {rank}"

    def all_reduce(self, tensor: torch.Tensor, op: str = "sum") -> torch.Tensor:
        if self.is_alone:
            return tensor
        tensor = tensor.detach().clone(memory_format=torch.contiguous_format)  # backends sum in the order of memory
        with self.group.watched():
            dist.all_reduce(tensor, dist.ReduceOp.MAX if op == "max" else dist.ReduceOp.SUM)
        return tensor

    def all_reduce_ints(self, numbers: Sequence[int]) -> Sequence[int]:
        if self.is_alone:
            return numbers
        # Gathered, since gloo gathers in less than half the time of a reduction; on the host, to not wait for a GPU.
        tensor = torch.tensor(numbers, dtype=torch.int64)
        parts = self._all_gather(tensor)
        _recent_numbers.append([tensor, *parts])
        return [sum(column) for column in zip(*(part.tolist() for part in parts), strict=True)]

    def read_scalars(self, scalars: Sequence[torch.Tensor], summed: bool = False) -> list[float]:
        if self.is_alone or not (summed and scalars):
            return super().read_scalars(scalars)
        # Gathered, so that the bits do not depend on how many are read together: a reduction's order does.
        shares: list[list[float]] = torch.stack(self._all_gather(torch.stack([*scalars]))).tolist()
        return [sum(column) for column in zip(*self.once_a_reader(shares), strict=True)]

    def make_vote(self, runs_ahead: bool) -> Vote:
        place = self.group.place
        is_tree = place.world_size >= vote.TREE_PROCESSES
        if self.is_alone or not (is_tree or runs_ahead):
            return Vote(self.all_reduce_ints)
        name, store = self.broadcast(vote.next_name()), dist.distributed_c10d._get_default_store()

        def join(of: str, ranks: Sequence[int]) -> Any:
            with self.group.watched(), self.group.opened():
                return vote.join_group(store, f"{name}/{of}", place.rank, ranks, self.group.timeout)

        if is_tree:
            return vote.make_tree_vote(place.rank, self._gathered(place.node), join, self.group.watched)
        return RingVote(join("all", range(place.world_size)), self.group.watched)

    def open_peer_channel(self) -> PeerChannel | None:
        """Return a channel on which a thread reaches the other processes; None without others. Collective."""
        if self.is_alone:
            return None
        place, connections = self.group.place, Connections()
        name, store = self.broadcast(f"peers/{uuid.uuid4().hex}"), dist.distributed_c10d._get_default_store()
        ranks = range(place.world_size)
        with self.group.watched(), self.group.opened(), connections.opened(except_port=place.port):
            group = vote.join_group(store, name, place.rank, ranks, self.group.timeout)
        return PeerChannel(group, self._gathered(place.node), connections)

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.is_alone:
            return tensor
        tensor = tensor.detach().reshape(1) if tensor.ndim == 0 else tensor.detach()
        lengths = [int(part) for part in self._all_gather(torch.tensor([tensor.shape[0]]))]
        padded = tensor.new_zeros(max(lengths), *tensor.shape[1:])
        padded[: tensor.shape[0]] = tensor
        # As bytes: not every backend supports every dtype.
        parts = self._all_gather(padded.reshape(-1).view(torch.uint8))
        rows = [part.view(tensor.dtype).reshape(padded.shape) for part in parts]
        return torch.cat([row[:length] for row, length in zip(rows, lengths, strict=True)])

    def gather_object(self, value: T) -> list[T]:
        return self._gathered(value)

    def _gathered(self, value: T) -> list[T]:
        if self.is_alone:
            return [value]
        values: list[Any] = [None] * self.group.place.world_size
        with self.group.watched():
            dist.all_gather_object(values, value)
        return values

    def gather_to_main(self, value: T) -> list[T]:
        if self.is_alone:
            return [value]
        values: list[Any] = [None] * self.group.place.world_size if self.is_main else []
        with self.group.watched():
            dist.gather_object(None if self.is_main else value, values or None)
        return [value, *values[1:]] if self.is_main else []

    def broadcast(self, value: T, source: int = 0) -> T:
        if self.is_alone:
            return value
        values = [value]
        with self.group.watched():
            dist.broadcast_object_list(values, source)
        return values[0]

    def begun(self) -> int:
        found = 0
        for group in dist.distributed_c10d._world.pg_map:
            with contextlib.suppress(RuntimeError):  # some backends do not number their collectives
                found += group._get_sequence_number_for_group()  # type: ignore[attr-defined]
        return found

    def find_absent(self) -> list[str]:
        return self.group.find_absent()

    def barrier(self) -> None:
        self.all_reduce_ints([0])

    def on_main(self, function: Callable[[], T]) -> T:
        if self.is_alone:  # or a newcomer, for which the main process of the others has done it
            return function() if self.is_main else cast("T", None)
        outcome: tuple[T | None, BaseException | None] = (None, None)
        if self.is_main:
            try:
                outcome = (function(), None)
                pickle.dumps(outcome[0])
            except BaseException as error:  # otherwise the other processes would hang
                self.broadcast((None, _portable(error)))
                raise
        value, raised = self.broadcast(outcome)
        if raised is not None:
            raise raised
        return cast("T", value)

    def check_same_on_all_ranks(self, facts: Mapping[str, Any]) -> None:
        if self.is_alone:
            return
        if len(set(self._gathered(xxhash.xxh3_64_hexdigest(repr([*facts.items()]).encode())))) == 1:
            return  # a hash, so that not all names are sent
        main, *others = self._gathered(dict(facts))
        first = self.describe_rank(0)
        for rank, other in enumerate(others, start=1):
            there = self.describe_rank(rank)
            for name in [*main, *other]:
                ours, theirs = main.get(name, "nothing"), other.get(name, "nothing")
                if ours != theirs:
                    raise ValueError(
                        f"{name} differs: {theirs!r} on {there}, {ours!r} on {first}; start every "
                        "process with the same script, arguments and versions"
                    )
            for name, another in zip(main, other, strict=True):
                if name != another:
                    raise ValueError(
                        f"{another} on {there} stands where {name} does on {first}: the same things "
                        "in another order; make them in the same order in every process (that of a set of strings "
                        "changes from process to process: sort it, or give all processes the same PYTHONHASHSEED)"
                    )

    def _all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        parts = [torch.empty_like(tensor) for _ in range(self.group.place.world_size)]
        with self.group.watched():
            dist.all_gather(parts, tensor)
        return parts


def _portable(error: BaseException) -> BaseException:
    """Return the error itself, or a RuntimeError with its text if it cannot be pickled."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # __reduce__ may raise anything
        return RuntimeError(f"on rank 0: {type(error).__name__}: {error}")
    return error
