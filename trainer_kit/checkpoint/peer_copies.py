"""`PeerCopier`: copies a run's state to the memory of its machines, each part to that of two."""

from __future__ import annotations

import logging
import os
import shutil
import socket
import uuid
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, wait
from pathlib import Path
from typing import NamedTuple

import torch

from trainer_kit.checkpoint import CHECKPOINT_PREFIX, Committed
from trainer_kit.checkpoint.async_saver import LOSS_SECONDS, SHARED, AsyncSaver, States
from trainer_kit.checkpoint.contribution import Contribution
from trainer_kit.checkpoint.copying import Copying
from trainer_kit.checkpoint.format.disk import remove_folder
from trainer_kit.checkpoint.generations import (
    Marker,
    folders_of,
    holder_of,
    make_private_folder,
    read_marker,
    remove_generations,
    remove_marker,
    step_of,
    write_marker,
)
from trainer_kit.checkpoint.staging import HostStaging
from trainer_kit.checkpoint.writers import Writers
from trainer_kit.config import environment
from trainer_kit.strategies.peer_channel import PeerChannel
from trainer_kit.utils.units import format_size

logger = logging.getLogger("trainer_kit")

_LEFT = "another process left"  # what the others see of a process that fails
_POLL_SECONDS = 0.05


class _Room(NamedTuple):
    """The memory of a machine, and what one of its processes adds to it, in bytes."""

    place: tuple[str, int]
    root: Path
    free: int
    added: int
    freed: int
    problem: str | None


class PeerCopier:
    """Copies a run's state to host memory, and each process's part to the memory of another machine, in a thread.

    A copy has the files of a checkpoint. It is taken as one is, with the same host copies, so that no copy begins
    while a save is under way, and the other way round. A generation is complete when all processes have their files and
    those of their peers. The newest complete generation stays while the next one is made, and the one before it until
    then.

    Args:
        saver: Saver of the run's checkpoints.
        root: Folder in host memory.

    Attributes:
        is_busy: Whether a copy has begun and `finish` has not returned its result.
    """

    def __init__(self, saver: AsyncSaver, root: Path) -> None:
        self.run = saver.run
        self.root = root
        self.is_busy = False
        self._saver = saver
        self._requests = saver.run.requests
        self._writers = Writers(saver.run.strategy, SHARED, saver.run.args.max_shard_size)
        self._marker: Marker | None = None  # None until `open`
        self._copying: Copying | None = None
        self._complete: list[str] = []  # names of complete generations, oldest first
        self._is_sure = True  # whether all processes have the same ones
        self._channel: PeerChannel | None = None
        self._processes: list[str] = []  # a description of each, by rank
        self._logged: str | None = None  # the last reason of a failure

    @property
    def _folder(self) -> Path:
        assert self._marker is not None, "open() comes first"
        return self._marker.folder(self.root)

    def open(self) -> None:
        """Prepare copies, and remove those that were made before. Collective.

        Raises:
            ValueError: If a machine lacks the folder in host memory, or the strategy cannot copy.
        """
        collectives, output_dir = self.run.strategy.collectives, self._saver.folder
        if self._channel is None:
            self._connect()
        earlier = read_marker(output_dir) if collectives.is_main else None
        self._marker, self._complete = collectives.broadcast(Marker.after(earlier, output_dir)), []
        if collectives.is_main:
            self.mark()
        problem: str | None = None
        try:
            for each in self._marker.others(self.root) if collectives.is_local_main else ():
                remove_folder(each)
            make_private_folder(self._folder)
        except OSError as error:
            problem = str(error)
        for rank, found in enumerate(collectives.gather_object(problem)):
            if found is not None:
                raise ValueError(
                    f"PeerCopies(folder={str(self.root)!r}) cannot be used on {collectives.describe_rank(rank)}: "
                    f"{found}; give a folder in host memory (a tmpfs) that this user may write to"
                )

    def mark(self) -> None:
        """Say in the output folder where the copies are; called on the main process."""
        assert self._marker is not None, "open() comes first"
        if read_marker(self._saver.folder) != self._marker:
            try:
                write_marker(self._saver.folder, self._marker)
            except OSError as error:
                logger.warning("a restart will not find the copies of the state in memory: %s", error)

    def begin(self, model_state: Mapping[str, torch.Tensor], states: States, metric: float | None) -> None:
        """Take a snapshot of the run and begin to copy it. Collective; see `AsyncSaver.begin`."""
        assert not self.is_busy, "one copy at a time"
        assert not self._saver.is_busy, "a save has the host copies"
        run, saver, collectives = self.run, self._saver, self.run.strategy.collectives
        if self._channel is None:  # the last copy failed, or processes were lost
            self._connect()
        if not self._is_sure:
            known = collectives.gather_object(self._complete)
            self._complete = [name for name in self._complete if all(name in names for names in known)]
            self._is_sure = True
        step = run.state.step
        name = collectives.broadcast(f"{step:08}-{uuid.uuid4().hex[:8]}")
        committed = saver.committed_with(Committed(f"{CHECKPOINT_PREFIX}{step}", 0, metric))
        snapshot = saver.try_snapshot(model_state, lambda: states(committed))
        try:
            taken, division = self._writers.agree(snapshot)
        except OSError as error:
            self._report(step, str(error))
            return
        given: Future[Contribution] | None = None
        if self._writers.contributes(division):
            given = self._writers.all_give(
                lambda: saver.staged(self._writers, snapshot.result() if taken is None else taken, division),
                saver.copies.complete,
            )
        stale = self._stale()  # before another process writes something new
        problem = self._lack_of_room(given, stale)
        if problem is not None:
            saver.copies.abandon()
            self._report(step, problem)
            return
        self.is_busy = saver.is_copying = True
        self._copying = Copying(
            name, self._folder, run.strategy.rank, self._processes, self._channel, run.args.max_shard_size, given,
            stale, saver.copies.abandon, self._ask_to_finish,
        )  # fmt: skip
        self._copying.start()

    def finish(self, gives_up: bool = False) -> None:
        """Wait until the copy is made, and agree whether it is complete. Collective.

        Args:
            gives_up: Whether to give the copy up if it is not complete.
        """
        collectives, copying = self.run.strategy.collectives, self._copying
        assert copying is not None
        if gives_up:
            copying.cancel()
        # All ask one another meanwhile, so that a process that is lost is noticed.
        while collectives.all_reduce_ints([int(not wait([copying.result], _POLL_SECONDS).done)])[0]:
            pass
        problems = collectives.gather_object(copying.result.result())
        self._copying = None
        self.is_busy = self._saver.is_copying = self._requests.written = False
        found = [each for each in problems if each is not None]
        if found or gives_up:
            self._disconnect()
        if not found:
            self._complete, self._logged = [*self._complete[-1:], copying.name], None
            return
        if collectives.is_local_main:
            remove_generations([path for name, path in folders_of(self._folder) if name == copying.name])
        if not gives_up:
            self._report(step_of(copying.name), next((each for each in found if _LEFT not in each), found[0]))

    def drain(self) -> None:
        """Give up a copy that is under way, after an error or a loss of other processes. Not collective."""
        copying, self._copying = self._copying, None
        self.is_busy = self._saver.is_copying = self._is_sure = False
        if copying is not None:
            copying.cancel()
            if not wait([copying.result], LOSS_SECONDS).done:
                logger.warning("the copy of step %d that was begun is given up", step_of(copying.name))
                self._channel = None  # the thread has it
                self._saver.copies = HostStaging(self.run)
        elif not self._saver.is_busy:
            self._saver.copies.abandon()  # of a copy that could not begin
        self._disconnect()

    def close(self, is_complete: bool) -> None:
        """End the copies, and remove them unless the run is not complete and its newest state is in them alone.

        Args:
            is_complete: Whether the run has reached its end, and saved what it is to save.
        """
        if self._copying is not None:
            wait([self._copying.result], LOSS_SECONDS)
        self.drain()
        if self._marker is None:
            return
        try:
            self._remove(is_complete)
        except OSError as error:
            logger.warning("the copies of the state in memory could not be removed: %s", error)

    def _remove(self, is_complete: bool) -> None:
        saved = self._saver.committed
        on_disk = int(saved[-1].name.removeprefix(CHECKPOINT_PREFIX)) if saved else -1
        newest = max((step_of(name) for name, _ in folders_of(self._folder)), default=on_disk)
        if is_complete or newest <= on_disk:
            if self.run.strategy.collectives.is_local_main:
                remove_folder(self._folder)
            if is_complete and self.run.strategy.is_main:  # else other machines may still have copies
                remove_marker(self._saver.folder)
        elif self.run.strategy.is_main:
            logger.warning(
                "copies of the state up to step %d stay in memory (%s); train(resume_from_checkpoint=True) resumes "
                "from the newest complete one", newest, self._folder,
            )  # fmt: skip

    def _connect(self) -> None:
        collectives, size = self.run.strategy.collectives, self.run.strategy.world_size
        self._writers.ranks = [*range(size)]
        self._processes = [collectives.describe_rank(rank) for rank in range(size)]
        self._channel = self.run.strategy.session.open_peer_channel()

    def _disconnect(self) -> None:
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.break_off()
            channel.close()

    def _report(self, step: int, problem: str) -> None:
        if self.run.strategy.is_main and problem != self._logged:
            logger.warning(
                "the state of step %d was not copied to memory: %s; the next copy tries again", step, problem
            )
        self._logged = problem

    def _ask_to_finish(self) -> None:
        self._requests.written = True

    def _lack_of_room(self, given: Future[Contribution] | None, stale: Sequence[Path]) -> str | None:
        """Return why the copy cannot be made, the same on all processes; None if nothing prevents it. Collective."""
        collectives, problem, added, free, freed = self.run.strategy.collectives, None, 0, 0, 0
        try:
            added = 0 if given is None else given.result().snapshot.own_nbytes
            free = shutil.disk_usage(self._folder).free
            freed = sum(file.stat().st_size for path in stale for file in path.rglob("*") if file.is_file())
            device = os.stat(self._folder).st_dev
        except Exception as error:
            problem, device = str(error) or type(error).__name__, 0
        rooms = collectives.gather_object(_Room((socket.gethostname(), device), self.root, free, added, freed, problem))
        for rank, room in enumerate(rooms):
            if room.problem is not None:
                return f"{collectives.describe_rank(rank)}: {room.problem}"
        peers = [None] * len(rooms) if self._channel is None else self._channel.peers
        for place in dict.fromkeys(room.place for room in rooms):
            ranks = [rank for rank, room in enumerate(rooms) if room.place == place]
            needed = sum(rooms[rank].added for rank in ranks)
            needed += sum(room.added for room, peer in zip(rooms, peers, strict=True) if peer in ranks)
            has = min(rooms[rank].free for rank in ranks) + sum(rooms[rank].freed for rank in ranks)
            if needed > has:
                return (
                    f"{rooms[ranks[0]].root} on {place[0]} has {format_size(has)} left, a copy needs "
                    f"{format_size(needed)}; make it larger (docker run --shm-size), or give PeerCopies another folder"
                )
        return None

    def _stale(self) -> list[Path]:
        """Return the folders of older generations that this process removes for the next one.

        Each removes its own, before it writes; the first process of a machine those of processes that are gone.
        """
        collectives, rank = self.run.strategy.collectives, self.run.strategy.rank
        first = rank - collectives.local_rank
        here = range(first, first + environment.place().local_world_size)
        stale = [path for name, path in folders_of(self._folder) if name not in self._complete[-1:]]
        holders = {path: holder_of(path) for path in stale}
        return [
            path
            for path, holder in holders.items()
            if holder == rank or (collectives.is_local_main and holder not in here)
        ]
