"""`Writers`: the processes that write checkpoints together, and what each gives to one."""

from __future__ import annotations

import errno
import logging
import uuid
from collections.abc import Callable, Collection
from concurrent.futures import Future
from pathlib import Path

from trainer_kit.checkpoint import Snapshot
from trainer_kit.checkpoint.contribution import Contribution, align_with_main
from trainer_kit.checkpoint.format.commit import open_staging
from trainer_kit.checkpoint.format.ownership import Division
from trainer_kit.checkpoint.save import Save
from trainer_kit.strategies.base import Strategy

logger = logging.getLogger("trainer_kit")


class Writers:
    """The processes that write checkpoints together.

    Those that see the folder do so if they compute the same `Division` of the tensors. The main process writes
    everything else, and commits the checkpoint.

    Args:
        strategy: The strategy.
        shared: Names of the states that all processes have alike, so that several can write them together.
        max_shard_size: See `write_checkpoint`.

    Attributes:
        ranks: Ranks of the processes, the main one first; from `Session.find_writers`.
    """

    def __init__(self, strategy: Strategy, shared: Collection[str], max_shard_size: int | str) -> None:
        self.ranks = [0]
        self.max_shard_size = max_shard_size
        self._strategy, self._shared = strategy, shared

    def agree(self, snapshot: Future[Snapshot]) -> tuple[Snapshot | None, Division | None]:
        """Return the snapshot to write and how the processes write it together. Collective.

        The snapshot is None if this process has none, the division if the main process writes alone. If a process
        cannot take part, the main process writes alone from then on, which is logged.

        Raises:
            OSError: If a process cannot take part in writing a sharded state; raised on all processes.
        """
        strategy, collectives = self._strategy, self._strategy.collectives
        error, division, pinned = snapshot.exception(), None, set[str]()
        taken = snapshot.result() if error is None else None
        if len(self.ranks) == 1 and not strategy.sharding.is_active:
            return taken, None
        if strategy.sharding.is_active:
            taken, pinned = align_with_main(taken, self._shared, strategy)
        if taken is not None:
            division = taken.divide(
                {*self._shared, *pinned},
                len(self.ranks),
                self.max_shard_size,
                lambda name, tensor: name in pinned and not strategy.sharding.is_sharded(tensor),
            )
        answers = collectives.gather_object((division and division.digest, f"{type(error).__name__}: {error}"))
        digests = [digest for digest, _ in answers]
        apart = [rank for rank, digest in enumerate(digests) if digest is None or digest != digests[0]]
        if not apart:
            return taken, division
        if apart[0] > 0:  # else the main process raises its error
            rank, (digest, problem) = collectives.describe_rank(apart[0]), answers[apart[0]]
            why = "has other tensors in its model or optimizer" if digest else f"cannot give its state ({problem})"
            if strategy.sharding.is_active:
                raise OSError(f"{rank} {why}")
            self.ranks = [0]
            if collectives.is_main:
                logger.warning("the main process writes all checkpoints alone, since %s %s", rank, why)
        return taken, None

    def contributors(self, division: Division | None) -> list[int]:
        """Return the ranks that write a part or have parts of what others write, the main one first."""
        if self._strategy.sharding.is_active:
            return [*range(self._strategy.world_size)]
        return self.ranks[: division.writers if division is not None else 1]

    def contributes(self, division: Division | None) -> bool:
        """Return whether this process is one of the contributors."""
        # Each host of XLA has rank 0.
        return self._strategy.is_main or self._strategy.rank in self.contributors(division)[1:]

    def contribution(self, snapshot: Snapshot, division: Division | None) -> Contribution:
        """Return what this process gives to a save: nothing of its own if it writes no part."""
        rank = self._strategy.rank
        writer = self.ranks.index(rank) if rank in self.ranks else len(self.ranks)
        share = snapshot._replace(division=division, writer=writer)
        return Contribution.of(share, self.ranks, self._strategy.sharding)

    def all_give(self, make: Callable[[], Contribution], release: Callable[[], object]) -> Future[Contribution]:
        """Return what this process gives to a save, or why it cannot. Collective if sharding is active.

        Args:
            make: Returns the contribution.
            release: Called if another process has none, so that none is needed here.
        """
        contribution: Future[Contribution] = Future()
        try:
            contribution.set_result(make().prepared(self._strategy.device_info.to_host))
        except Exception as error:
            contribution.set_exception(error)
        if not self._strategy.sharding.is_active:
            return contribution
        collectives = self._strategy.collectives
        failed = collectives.gather_object(contribution.exception() is not None)
        if any(failed) and contribution.exception() is None:  # that process sends no parts, so that none does
            release()
            who = collectives.describe_rank(failed.index(True))
            contribution = Future()
            contribution.set_exception(OSError(errno.ENOMEM, f"{who} has no copy of its part of the state"))
        return contribution

    def write_now(self, target: Path, snapshot: Future[Snapshot], confirm: Callable[[], object]) -> Path:
        """Write a checkpoint before this call returns. Collective.

        Args:
            target: Folder of the checkpoint; only read on the main process.
            snapshot: Snapshot of this process, or its error.
            confirm: See `write_checkpoint`; called on the main process.

        Returns:
            Folder of the checkpoint.

        Raises:
            OSError: If the disk of any process is full or cannot be written; raised on all processes.
        """
        strategy, collectives = self._strategy, self._strategy.collectives
        taken, division = self.agree(snapshot)

        def begin() -> Save:
            step = snapshot.result().step
            return Save(step, open_staging(target.parent, target.name).absolute(), uuid.uuid4().hex)

        save, others = collectives.on_main(begin), self.contributors(division)[1:]
        contribution: Future[Contribution] = Future()
        if self.contributes(division):
            assert taken is not None, "the processes have agreed"
            contribution = self.all_give(lambda: self.contribution(taken, division), lambda: None)
        if strategy.rank in others:
            save.send_part(contribution, strategy, self.max_shard_size)
        return collectives.on_main(lambda: save.commit(contribution, strategy, others, self.max_shard_size, confirm))
