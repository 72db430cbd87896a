"""`PeerCopier`: copies a run's state to the memory of its machines, each part to that of two."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import shutil
import socket
import uuid
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, NamedTuple

import torch

from trainer_kit.checkpoint import CHECKPOINT_PREFIX, Committed, FileEntry, Manifest
from trainer_kit.checkpoint.async_saver import LOSS_SECONDS, SHARED, AsyncSaver, States
from trainer_kit.checkpoint.contribution import Contribution
from trainer_kit.checkpoint.format.disk import remove_folder
from trainer_kit.checkpoint.format.manifest import STATE_FOLDER
from trainer_kit.checkpoint.generations import (
    MARKER,
    folder_name,
    folders_of,
    make_run_folder,
    read_marker,
    remove_generations,
    run_folder,
    write_manifest,
    write_marker,
)
from trainer_kit.checkpoint.transfer import Arrival, pieces_of, read_piece
from trainer_kit.checkpoint.writers import Writers
from trainer_kit.strategies.peer_channel import PeerChannel
from trainer_kit.utils.units import format_size

logger = logging.getLogger("trainer_kit")

_LEFT = "another process left"  # what the others see of a process that fails


class _KnownFailure(OSError):
    """A failure of one process of which all others know."""


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
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="copies")
        self._folder = root  # until `open`
        self._pending: Future[str | None] | None = None
        self._name = ""  # of the copy under way
        self._complete: list[str] = []  # names of complete generations, oldest first
        self._is_given_up = False  # whether the thread may wait for others
        self._is_sure = True  # whether all processes have the same ones
        self._channel: PeerChannel | None = None
        self._logged: str | None = None  # the last reason of a failure

    def open(self, run_id: str) -> None:
        """Prepare copies, and remove those of earlier starts. Collective.

        Args:
            run_id: ID of the run, of which that of the main process counts.

        Raises:
            ValueError: If a machine lacks the folder in host memory, or the strategy cannot copy.
        """
        collectives, output_dir = self.run.strategy.collectives, self._saver.folder
        self._connect()
        run_id, earlier = collectives.broadcast((run_id, read_marker(output_dir) if collectives.is_main else None))
        self._folder = run_folder(self.root, run_id)
        problem: str | None = None
        if collectives.is_local_main:
            for each in {run_id, earlier or run_id}:
                remove_folder(run_folder(self.root, each))
        collectives.barrier()  # two launchers on one machine may use one folder
        try:
            make_run_folder(self._folder)
            if collectives.is_main:
                write_marker(output_dir, run_id)
        except OSError as error:
            problem = str(error)
        for rank, found in enumerate(collectives.gather_object(problem)):
            if found is not None:
                raise ValueError(
                    f"PeerCopies(folder={str(self.root)!r}) cannot be used on {collectives.describe_rank(rank)}: "
                    f"{found}; give a folder in host memory (a tmpfs) that this user may write to"
                )

    def begin(self, model_state: Mapping[str, torch.Tensor], states: States, metric: float | None) -> None:
        """Take a snapshot of the run and begin to copy it. Collective; see `AsyncSaver.begin`."""
        assert not self.is_busy, "one copy at a time"
        assert not self._saver.is_busy, "a save has the host copies"
        run, saver, collectives = self.run, self._saver, self.run.strategy.collectives
        if self._channel is None:  # the last copy failed, or processes were lost
            self._connect()
        step = run.state.step
        self._name = collectives.broadcast(f"{step:08}-{uuid.uuid4().hex[:8]}")
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
        problem = self._lack_of_room(given)
        if problem is not None:
            self._release_staging()
            self._report(step, problem)
            return
        self.is_busy = saver.is_copying = True
        self._pending = self._thread.submit(self._copy, step, self._name, given, self._stale())

    def finish(self) -> None:
        """Wait until the copy is made, and agree whether it is complete. Collective."""
        collectives, step = self.run.strategy.collectives, _step_of(self._name)
        assert self._pending is not None
        problem, self._pending = self._pending.result(), None
        problems = collectives.gather_object(problem)
        self.is_busy = self._saver.is_copying = self._requests.written = False
        found = [each for each in problems if each is not None]
        if not found:
            self._complete, self._is_sure, self._logged = [*self._complete[-1:], self._name], True, None
            return
        self._disconnect()
        if collectives.is_local_main:
            remove_generations([path for name, path in folders_of(self._folder) if name == self._name])
        self._report(step, next((each for each in found if _LEFT not in each), found[0]))

    def drain(self) -> None:
        """Give up a copy that is under way, after an error or a loss of other processes. Not collective."""
        pending, self._pending = self._pending, None
        self.is_busy = self._saver.is_copying = self._is_sure = False
        if self._channel is not None:
            self._channel.break_off()
        if pending is not None and not wait([pending], LOSS_SECONDS).done:
            logger.warning("the copy of step %d that was begun is given up", _step_of(self._name))
            self._channel, self._is_given_up = None, True  # the thread has it
        self._disconnect()

    def forget(self) -> None:
        """Remove all copies: the run has gone back to an earlier step."""
        self._complete = []
        remove_generations([path for _, path in folders_of(self._folder)])

    def close(self, is_complete: bool) -> None:
        """End the copies, and remove them unless the run is not complete and its newest state is in them alone.

        Args:
            is_complete: Whether the run has reached its end, and saved what it is to save.
        """
        if self._pending is not None:
            wait([self._pending], LOSS_SECONDS)
        self.drain()
        self._thread.shutdown(wait=not self._is_given_up)
        saved = self._saver.committed
        on_disk = int(saved[-1].name.removeprefix(CHECKPOINT_PREFIX)) if saved else -1
        newest = max((_step_of(name) for name, _ in folders_of(self._folder)), default=on_disk)
        if is_complete or newest <= on_disk:
            if self.run.strategy.collectives.is_local_main:
                remove_folder(self._folder)
            if is_complete and self.run.strategy.is_main:  # else other machines may still have copies
                (self._saver.folder / MARKER).unlink(missing_ok=True)
        elif self.run.strategy.is_main:
            logger.warning(
                "copies of the state up to step %d stay in memory (%s); train(resume_from_checkpoint=True) resumes "
                "from the newest complete one", newest, self._folder,
            )  # fmt: skip

    def _connect(self) -> None:
        self._writers.ranks = [*range(self.run.strategy.world_size)]
        self._channel = self.run.strategy.session.open_peer_channel()

    def _disconnect(self) -> None:
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.break_off()
            channel.close()

    @property
    def _own_rank(self) -> str:
        return self.run.strategy.collectives.describe_rank(self.run.strategy.rank)

    def _report(self, step: int, problem: str) -> None:
        if self.run.strategy.is_main and problem != self._logged:
            logger.warning(
                "the state of step %d was not copied to memory: %s; the next copy tries again", step, problem
            )
        self._logged = problem

    def _release_staging(self) -> None:
        """Let the optimizer change its state if no copy of it is taken."""
        if self._saver.copies.is_under_way:
            with contextlib.suppress(OSError):
                self._saver.copies.complete()

    def _lack_of_room(self, given: Future[Contribution] | None) -> str | None:
        """Return why the copy cannot be made, the same on all processes; None if nothing prevents it. Collective."""
        collectives, problem, added, free = self.run.strategy.collectives, None, 0, 0
        try:
            added = 0 if given is None else given.result().snapshot.own_nbytes
            free = shutil.disk_usage(self._folder).free
            device = os.stat(self._folder).st_dev
        except Exception as error:
            problem, device = str(error) or type(error).__name__, 0
        freed = sum(file.stat().st_size for path in self._stale() for file in path.rglob("*") if file.is_file())
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
        """Return the folders of older generations that this process removes for the next one."""
        if not (self._is_sure and self.run.strategy.collectives.is_local_main):
            return []
        return [path for name, path in folders_of(self._folder) if name not in self._complete[-1:]]

    # In the thread

    def _copy(self, step: int, name: str, given: Future[Contribution] | None, stale: Sequence[Path]) -> str | None:
        """Write this process's part and exchange it with its peers; return what failed, None if nothing did."""
        try:
            remove_generations(stale)
            entries, problem = self._write(name, given)
            self._exchange(step, name, self._agree(entries, problem))
        except Exception as error:
            if self._channel is not None:
                self._channel.break_off()  # the others must not wait for this process
            if not isinstance(error, (OSError, MemoryError)):
                logger.warning("the copy of step %d failed", step, exc_info=True)
            own = "" if isinstance(error, _KnownFailure) else f"{self._own_rank}: "
            return f"{own}{str(error) or type(error).__name__}"
        else:
            return None
        finally:
            self._release_staging()
            self._requests.written = True

    def _write(self, name: str, given: Future[Contribution] | None) -> tuple[dict[str, FileEntry], str | None]:
        """Write this process's files; return their entries, and what failed."""
        rank = self.run.strategy.rank
        folder = self._folder / folder_name(name, rank, rank)
        with contextlib.suppress(OSError):  # writing fails then, after the parts are sent that others need
            make_run_folder(self._folder)
            if given is not None:
                (folder / STATE_FOLDER).mkdir(parents=True)
        if given is None:
            return {}, None
        try:
            return given.result().write(folder, self.run.args.max_shard_size), None
        except (OSError, MemoryError) as error:
            return {}, str(error) or "no memory"

    def _agree(self, entries: Mapping[str, FileEntry], problem: str | None) -> list[Mapping[str, FileEntry]]:
        """Return the entries of all processes' files. Collective.

        Raises:
            _KnownFailure: If a process has failed.
        """
        own: dict[str, Any] = {
            "files": {name: dataclasses.asdict(entry) for name, entry in entries.items()},
            "problem": problem,
        }
        answers = [own] if self._channel is None else self._channel.gather(own)
        for rank, answer in enumerate(answers):
            if answer["problem"] is not None:
                raise _KnownFailure(f"{self.run.strategy.collectives.describe_rank(rank)}: {answer['problem']}")
        return [{name: FileEntry(**entry) for name, entry in answer["files"].items()} for answer in answers]

    def _exchange(self, step: int, name: str, entries: Sequence[Mapping[str, FileEntry]]) -> None:
        """Complete this process's part of a generation, and receive the files of those whose peer it is. Collective.

        Raises:
            OSError: If a process has failed.
        """
        rank, channel = self.run.strategy.rank, self._channel
        files = {file: entry for each in entries for file, entry in each.items()}
        manifest = Manifest.of(files, step, self.run.strategy.world_size)
        folder, problem = self._folder / folder_name(name, rank, rank), None
        if entries[rank]:
            write_manifest(folder, manifest)
        if channel is None or not any(peer is not None for peer in channel.peers):
            return
        own, number = pieces_of(entries[rank]), 0
        senders = [sender for sender, peer in enumerate(channel.peers) if peer == rank and entries[sender]]
        arrivals = {
            sender: Arrival(self._folder / folder_name(name, sender, rank), entries[sender]) for sender in senders
        }
        while number < len(own) or any(each.is_waiting for each in arrivals.values()):
            sent, error = read_piece(folder, own[number]) if number < len(own) else (None, None)
            problem, number = problem or error, number + 1
            received = {sender: each.buffer() for sender, each in arrivals.items() if each.is_waiting}
            channel.exchange(sent, received)
            for sender, content in received.items():
                arrivals[sender].write(content)
        for each in arrivals.values():
            problem = problem or each.finish(manifest)
        self._agree({}, problem)


def _step_of(name: str) -> int:
    return int(name.partition("-")[0])
