"""`MultiNodeSession`: a run on machines with or without a shared file system."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import tempfile
import time
import uuid
import weakref
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from trainer_kit.strategies.process_collectives import ProcessCollectives
from trainer_kit.strategies.process_session import ProcessSession
from trainer_kit.utils.units import format_size, join_names

logger = logging.getLogger("trainer_kit")

_PIECE_BYTES = 2**24

_LOOKS = (0.0, 0.1, 0.3, 0.6)
"""Seconds before each check for a new file, which a network file system may show late."""


class MultiNodeSession(ProcessSession):
    """A session that sends a checkpoint to the machines that cannot read its folder.

    Args:
        collectives: The strategy's collectives.

    Attributes:
        machines: Ranks by machine, each machine's first process first; empty before the rendezvous.
    """

    def __init__(self, collectives: ProcessCollectives) -> None:
        super().__init__(collectives)
        self.machines: dict[int, list[int]] = {}
        self._copied = False  # whether any machine has a copy
        self._remove_copy: Callable[[], Any] | None = None  # removes the copy of this process

    def end_training(self, error: BaseException | None) -> None:
        super().end_training(error)
        self._discard()

    def find_writers(self, directory: Path) -> list[int]:
        blind = self._ranks_without(directory)
        if self.collectives.is_main and blind:
            logger.info(
                "%s is not shared with %s: checkpoints and logs are on %s alone, where rank 0 must run again to resume",
                directory, self._hosts_of(blind), self.collectives.hosts[0],
            )  # fmt: skip
        elif self.collectives.is_main and self.group.place.has_several_machines:
            logger.info("%s is shared by all machines", directory)
        apart = self._ranks_beside(blind)
        return [rank for rank in super().find_writers(directory) if rank not in apart]

    def find_readers(self, directory: Path) -> list[int]:
        apart = self._ranks_beside(self._ranks_without(directory))
        return [rank for rank in super().find_readers(directory) if rank not in apart]

    def _ranks_beside(self, first: Collection[int]) -> set[int]:
        """Return all ranks of the machines that have these first ranks."""
        return {rank for ranks in self.machines.values() if ranks[0] in first for rank in ranks}

    def fetch_checkpoint(self, directory: Path) -> Path:
        """Return `directory`, or a copy in TMPDIR if this machine cannot read it; see `Session`. Collective.

        Copies exist until `release_checkpoint_copies`.

        Raises:
            OSError: If a file cannot be read or written, or the disk is too full; the message names the machine.
        """
        blind = self._ranks_without(directory)
        if not blind:
            return directory
        self._discard()
        self._copied = True
        sizes = self.collectives.on_main(lambda: _sizes(directory))
        total = sum(sizes.values())
        if self.collectives.is_main:
            logger.info(
                "sending %s (%s) to %s, where it is not seen", directory, format_size(total), self._hosts_of(blind)
            )  # fmt: skip
        folder, problems = directory, list[str]()
        if self.collectives.rank in blind:
            with _kept_in(problems):
                folder = self._new_folder(total)
        self._raise_any(problems, directory)
        chain = [0, *blind]
        for name, size in sizes.items():
            if self.collectives.rank in chain:
                self._pass_on(folder / name, size, chain, problems)
            self._raise_any(problems, directory)  # after each file: other processes wait here
        return self.collectives.gather_object(folder)[self.machines[self.group.place.node][0]]

    def release_checkpoint_copies(self) -> None:
        if self._copied:
            self.collectives.barrier()  # all processes of a machine read the same copy
            self._discard()

    def bring_to_main(self, source: Path, holder: int, target: Path, size: int) -> None:
        chain, problems = [holder, 0], list[str]()
        if self.collectives.rank in chain:
            self._pass_on(target if self.collectives.is_main else source, size, chain, problems)
        for rank, found in enumerate(self.collectives.gather_object(problems)):
            if found:
                raise OSError(f"{self.collectives.describe_rank(rank)}: {found[0]}")

    def _discard(self) -> None:
        if self._remove_copy is not None:
            self._remove_copy()
        self._copied, self._remove_copy = False, None

    def _ranks_without(self, directory: Path) -> list[int]:
        """Return the first rank of each machine that cannot read the main process's folder of this name.

        The main process creates a marker file for the others to find; if it cannot, no other machine reads the folder.
        """
        if not self.group.place.has_several_machines:
            return []
        marker = self.collectives.on_main(lambda: _mark(directory))
        try:
            sees = self.collectives.gather_object(
                self.collectives.is_main or (self.collectives.is_local_main and _appears(marker))
            )
        finally:
            if self.collectives.is_main and marker is not None:
                marker.unlink(missing_ok=True)
        return [ranks[0] for ranks in self.machines.values() if not any(sees[rank] for rank in ranks)]

    def _hosts_of(self, ranks: list[int]) -> str:
        return join_names(self.collectives.hosts[rank] for rank in ranks)

    def _new_folder(self, needed: int) -> Path:
        folder = Path(tempfile.mkdtemp(prefix="trainer_kit-"))
        self._remove_copy = weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        free = shutil.disk_usage(folder).free
        if free < needed:
            raise OSError(f"{folder.parent} has {format_size(free)} left of the {format_size(needed)} needed")
        return folder

    def _pass_on(self, path: Path, size: int, chain: list[int], problems: list[str]) -> None:
        """Read a file (main process) or receive and write it, and send it to the next machine in the chain.

        All pieces are sent even after an error, so that no machine waits. The transfer uses the group of all processes
        on the host: with GPUs, creating a subgroup is a collective of all processes, which would hang here.
        """
        place = chain.index(self.collectives.rank)
        if place > 0:
            with _kept_in(problems):
                path.parent.mkdir(parents=True, exist_ok=True)
                path.touch()
        buffer = torch.empty(min(size, _PIECE_BYTES), dtype=torch.uint8)
        for start in range(0, size, _PIECE_BYTES):
            piece = buffer[: size - start]
            if place > 0:
                with self.group.watched():
                    dist.recv(piece, chain[place - 1])
            elif not problems:
                with _kept_in(problems):
                    _read_piece(path, start, piece)
            if place + 1 < len(chain):
                with self.group.watched():
                    dist.send(piece, chain[place + 1])
            if place > 0 and not problems:
                with _kept_in(problems), open(path, "ab") as file:
                    file.write(piece.numpy().data)

    def _raise_any(self, problems: list[str], directory: Path) -> None:
        """Raise the errors of any process on all processes."""
        if not any(self.collectives.all_reduce_ints([len(problems)])):
            return
        found = [
            f"{self.collectives.describe_rank(rank)}: {each[0]}"
            for rank, each in enumerate(self.collectives.gather_object(problems))
            if each
        ]
        raise OSError(
            f"{directory} cannot be sent to the machines that do not see it ({'; '.join(found)}); set TMPDIR there to "
            "a folder with room, or put it on a disk that all machines share"
        )


@contextlib.contextmanager
def _kept_in(problems: list[str]) -> Iterator[None]:
    """Record an OSError in `problems`, to be raised once no process waits for this one."""
    try:
        yield
    except OSError as error:
        problems.append(str(error))


def _mark(directory: Path) -> Path | None:
    """Create a marker file in the folder; return None if it cannot be written."""
    marker = directory / f".seen-{uuid.uuid4().hex}"
    try:
        marker.touch()
    except OSError:
        return None
    return marker


def _appears(marker: Path | None) -> bool:
    if marker is None:
        return False
    for pause in _LOOKS:
        time.sleep(pause)
        with contextlib.suppress(OSError):
            if marker.name in os.listdir(marker.parent):  # a listing refreshes a network file system's cache
                return True
    return False


def _sizes(directory: Path) -> dict[str, int]:
    """Return the size of each file below a folder in bytes, by its relative path."""
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    return {path.relative_to(directory).as_posix(): path.stat().st_size for path in files}


def _read_piece(path: Path, start: int, piece: torch.Tensor) -> None:
    with open(path, "rb") as file:
        file.seek(start)
        if file.readinto(piece.numpy().data) != len(piece):
            raise OSError(f"{path} has become shorter")
