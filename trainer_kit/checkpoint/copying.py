"""`Copying`: one copy of a run's state on its way to the memory of its machines."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from trainer_kit.checkpoint import FileEntry, Manifest
from trainer_kit.checkpoint.contribution import Contribution
from trainer_kit.checkpoint.format.manifest import STATE_FOLDER
from trainer_kit.checkpoint.generations import (
    folder_name,
    make_private_folder,
    remove_generations,
    step_of,
    write_manifest,
)
from trainer_kit.checkpoint.transfer import Arrival, pieces_of, read_piece
from trainer_kit.strategies.peer_channel import PeerChannel

logger = logging.getLogger("trainer_kit")


class _KnownFailure(OSError):
    """A failure of one process of which all others know."""


class _Cancelled(Exception):
    """The copy has been given up."""


@dataclasses.dataclass
class Copying:
    """Writes this process's part of a generation to memory, and exchanges it with its peers, in a thread.

    It uses nothing that the run may replace meanwhile, so that it can be given up at any moment.

    Attributes:
        name: Name of the generation.
        folder: Folder of the run's copies.
        rank: Rank of this process.
        processes: A description of each process, by rank.
        channel: Connections to the other processes; None without others.
        max_shard_size: See `write_checkpoint`.
        given: What this process writes, or why it cannot; None: nothing.
        stale: Folders to remove before.
        release: Called when the host copies are not needed any more.
        done: Called in the end, unless the copy has been given up.
    """

    name: str
    folder: Path
    rank: int
    processes: Sequence[str]
    channel: PeerChannel | None
    max_shard_size: int | str
    given: Future[Contribution] | None
    stale: Sequence[Path]
    release: Callable[[], object]
    done: Callable[[], object]

    def __post_init__(self) -> None:
        self.result: Future[str | None] = Future()
        self._is_cancelled = threading.Event()

    def start(self) -> None:
        """Begin; `result` is what failed, None if nothing did."""
        threading.Thread(target=self._run, name="trainer_kit copies", daemon=True).start()

    def cancel(self) -> None:
        """Complete nothing any more."""
        self._is_cancelled.set()
        if self.channel is not None:
            self.channel.break_off()

    def _run(self) -> None:
        problem = None
        try:
            remove_generations(self.stale)
            self._exchange(self._agree(*self._write()))
        except Exception as error:
            if self.channel is not None:
                self.channel.break_off()  # the others must not wait for this process
            if not isinstance(error, (OSError, MemoryError, _Cancelled)):
                logger.warning("the copy of step %d failed", step_of(self.name), exc_info=True)
            own = "" if isinstance(error, _KnownFailure) else f"{self.processes[self.rank]}: "
            problem = f"{own}{str(error) or type(error).__name__}"
        self.release()
        if not self._is_cancelled.is_set():
            self.done()
        self.result.set_result(problem)

    def _write(self) -> tuple[dict[str, FileEntry], str | None]:
        """Write this process's files; return their entries, and what failed."""
        folder = self.folder / folder_name(self.name, self.rank, self.rank)
        with contextlib.suppress(OSError):  # writing fails then, after the parts are sent that others need
            make_private_folder(self.folder)
            if self.given is not None:
                (folder / STATE_FOLDER).mkdir(parents=True)
        if self.given is None:
            return {}, None
        try:
            return self.given.result().write(folder, self.max_shard_size), None
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
        answers = [own] if self.channel is None else self.channel.gather(own)
        for rank, answer in enumerate(answers):
            if answer["problem"] is not None:
                raise _KnownFailure(f"{self.processes[rank]}: {answer['problem']}")
        return [{name: FileEntry(**entry) for name, entry in answer["files"].items()} for answer in answers]

    def _exchange(self, entries: Sequence[Mapping[str, FileEntry]]) -> None:
        """Complete this process's part of a generation, and receive the files of those whose peer it is. Collective.

        Raises:
            OSError: If a process has failed.
        """
        files = {file: entry for each in entries for file, entry in each.items()}
        manifest = Manifest.of(files, step_of(self.name), len(self.processes))
        folder, problem = self.folder / folder_name(self.name, self.rank, self.rank), None
        if entries[self.rank]:
            self._complete(folder, manifest)
        if self.channel is None or not any(peer is not None for peer in self.channel.peers):
            return
        own, number = pieces_of(entries[self.rank]), 0
        senders = [rank for rank, peer in enumerate(self.channel.peers) if peer == self.rank and entries[rank]]
        arrivals = {
            sender: Arrival(self.folder / folder_name(self.name, sender, self.rank), entries[sender])
            for sender in senders
        }
        while number < len(own) or any(each.is_waiting for each in arrivals.values()):
            sent, error = read_piece(folder, own[number]) if number < len(own) else (None, None)
            problem, number = problem or error, number + 1
            received = {sender: each.buffer() for sender, each in arrivals.items() if each.is_waiting}
            self.channel.exchange(sent, received)
            for sender, content in received.items():
                arrivals[sender].write(content)
        for each in arrivals.values():
            problem = problem or each.finish()
            try:
                if problem is None:
                    self._complete(each.folder, manifest)
            except OSError as error:
                problem = str(error)
        self._agree({}, problem)

    def _complete(self, folder: Path, manifest: Manifest) -> None:
        if self._is_cancelled.is_set():
            raise _Cancelled("the copy is given up")
        write_manifest(folder, manifest)
