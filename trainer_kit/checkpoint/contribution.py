"""`Contribution`: what one process gives to a checkpoint that several may write together."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from trainer_kit.checkpoint import FileEntry, Snapshot
from trainer_kit.checkpoint.format.commit import write_part
from trainer_kit.checkpoint.format.safetensors_writer import storage_key
from trainer_kit.checkpoint.format.snapshot import Copy
from trainer_kit.strategies.base import Strategy
from trainer_kit.strategies.sharding import Sharding, ToHost


def align_with_main(
    snapshot: Snapshot | None, shared: Collection[str], strategy: Strategy
) -> tuple[Snapshot | None, set[str]]:
    """Give states with sharded tensors the plain tensors of the main process, whose values alone count. Collective.

    Args:
        snapshot: Snapshot of this process; None if it has none.
        shared: Names of the states that all processes have alike.
        strategy: The strategy.

    Returns:
        The snapshot, with tensors on the device "meta" in place of the main process's, and the names of those states.
    """
    is_sharded, states = strategy.sharding.is_sharded, dict(snapshot.states if snapshot is not None else {})
    plain = {
        name: {key: tensor for key, tensor in tensors.items() if not is_sharded(tensor)}
        for name, (_, tensors) in states.items()
        if name not in shared and any(map(is_sharded, tensors.values()))
    }
    empty: dict[Any, torch.Tensor] = {}  # tied tensors become one, so that all processes plan the same files
    for tensor in (tensor for tensors in plain.values() for tensor in tensors.values()):
        empty[storage_key(tensor)] = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    layout = {name: {key: empty[storage_key(each)] for key, each in tensors.items()} for name, tensors in plain.items()}
    layout = strategy.collectives.broadcast(layout)
    if snapshot is None:
        return None, {*layout}
    for name, others in layout.items():
        tree, tensors = states.get(name, (None, {}))
        own = {key: tensor for key, tensor in tensors.items() if is_sharded(tensor)}
        states[name] = tree, {**own, **(plain[name] if strategy.is_main else others)}
    return snapshot._replace(states=states), {*layout}


class Contribution(NamedTuple):
    """What one process gives to a save.

    Attributes:
        snapshot: Its share of the snapshot. Sharded tensors in it are always those of the model and the optimizer.
        sharding: Sharding of the run.
        sharded: The sharded tensors that all processes write together, in order.
        parts: This process's part of each.
        owners: Rank of the process that writes each.
        complete: Fills the copies in `snapshot` and `parts`; raises OSError if it cannot.
        collecting: From `Sharding.collecting`, in which the files are written; None before `prepared`.
    """

    snapshot: Snapshot
    sharding: Sharding
    sharded: Sequence[torch.Tensor]
    parts: Sequence[torch.Tensor]
    owners: Sequence[int]
    complete: Callable[[], object] = lambda: None
    collecting: contextlib.AbstractContextManager[ToHost] | None = None

    @classmethod
    def of(cls, share: Snapshot, writers: Sequence[int], sharding: Sharding) -> Contribution:
        """Return the contribution of a process, without copies.

        Args:
            share: The process's share of the snapshot.
            writers: Ranks of the processes that can write, by their numbers in the division.
            sharding: Sharding of the run.
        """
        stored = [(tensor, writers[writer]) for tensor, writer in share.stored() if sharding.is_sharded(tensor)]
        tensors, owners = [tensor for tensor, _ in stored], [owner for _, owner in stored]
        return cls(share, sharding, tensors, sharding.own_parts(tensors), owners)

    def copied(self, copy: Copy, complete: Callable[[], object]) -> Contribution:
        """Return this contribution with copies of the tensors, so that training can continue.

        Args:
            copy: Takes tensors and returns copies in the same order, which `complete` may fill later.
            complete: See `Contribution`.
        """
        is_sharded, parts = self.sharding.is_sharded, list[torch.Tensor]()

        def copy_with_parts(own: list[torch.Tensor]) -> list[torch.Tensor]:
            copies = iter(copy([*self.parts, *(tensor for tensor in own if not is_sharded(tensor))]))
            parts.extend(next(copies) for _ in self.parts)
            return [tensor if is_sharded(tensor) else next(copies) for tensor in own]

        return self._replace(snapshot=self.snapshot.copied(copy_with_parts), parts=parts, complete=complete)

    def prepared(self, to_host: ToHost) -> Contribution:
        """Return this contribution with the memory that `write` needs.

        Args:
            to_host: Returns a full copy of a tensor on the host.

        Raises:
            RuntimeError: If there is no memory.
        """
        return self._replace(collecting=self.sharding.collecting(self.sharded, self.parts, self.owners, to_host))

    def write(self, staging: Path, max_shard_size: int | str) -> dict[str, FileEntry]:
        """Write this process's files, and exchange parts of sharded tensors meanwhile; see `write_part`.

        Collective if sharding is active, in any thread.
        """
        assert self.collecting is not None, "prepared() comes first"
        with self.collecting as to_host:
            self.complete()
            return write_part(staging, self.snapshot, max_shard_size, to_host)
