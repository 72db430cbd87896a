"""Checks of checkpoints' files, which all processes that see the folder share."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import TypeVar

from trainer_kit.checkpoint.format.base_reference import BaseReference
from trainer_kit.checkpoint.format.discovery import verify_files
from trainer_kit.checkpoint.format.manifest import Manifest
from trainer_kit.errors import CheckpointError, UnreadableError
from trainer_kit.strategies.base import Strategy

T = TypeVar("T")
CheckFiles = Callable[[Path], object]


def find_on_main(strategy: Strategy, find: Callable[[CheckFiles], T]) -> T:
    """Return what the main process finds among checkpoints, whose files all processes check meanwhile. Collective.

    Args:
        strategy: Strategy that is set up.
        find: Called on the main process, with a function that checks a checkpoint as `verify_files` does.

    Raises:
        Exception: If `find` raises; raised on all processes.
    """
    collectives = strategy.collectives
    if collectives.world_size == 1:
        return collectives.on_main(lambda: find(verify_files))
    if not collectives.is_main:
        while (directory := collectives.broadcast(None)) is not None:
            _check_share(strategy, directory)
        return collectives.on_main(lambda: find(verify_files))

    def check(directory: Path) -> None:
        collectives.broadcast(directory)
        for problem in _check_share(strategy, directory):
            if problem is not None:
                raise problem

    outcome = Future[T]()
    try:
        outcome.set_result(find(check))
    except BaseException as error:  # otherwise the other processes would hang
        outcome.set_exception(error)
    collectives.broadcast(None)
    return collectives.on_main(outcome.result)


def _check_share(strategy: Strategy, directory: Path) -> list[CheckpointError | None]:
    """Check this process's share of the files; return what each process found. Collective."""
    readers, rank, problem = strategy.session.find_readers(directory), strategy.rank, None
    try:
        if rank in readers:
            manifest = Manifest.read(directory)
            largest_first = sorted(manifest.files, key=lambda name: (-manifest.files[name].size, name))
            manifest.check(directory, largest_first[readers.index(rank) :: len(readers)])
            BaseReference.read(directory)
    except CheckpointError as error:
        problem = error
    except OSError as error:
        problem = UnreadableError(f"{error.filename or directory} cannot be read: {error.strerror}")
    return strategy.collectives.gather_object(problem)
