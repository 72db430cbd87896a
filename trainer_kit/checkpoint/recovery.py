"""`recover`: writes copies of a run's state in the memory of its machines to the disk, as a checkpoint."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from trainer_kit.checkpoint import CHECKPOINT_PREFIX, FileEntry, Snapshot, find_checkpoints
from trainer_kit.checkpoint.format.commit import commit_staging, open_staging
from trainer_kit.checkpoint.format.disk import flush_file, make_folders, remove_folder, write_file
from trainer_kit.checkpoint.format.json_files import checksum
from trainer_kit.checkpoint.format.manifest import MANIFEST_NAME
from trainer_kit.checkpoint.generations import (
    Choice,
    Generation,
    choose,
    list_generations,
    newer_generations,
    read_generation,
    read_marker,
)
from trainer_kit.errors import CutOffError, SaveError
from trainer_kit.strategies.base import Strategy
from trainer_kit.utils.units import format_size, join_names

logger = logging.getLogger("trainer_kit")

_PIECE_BYTES = 2**22


def recover(
    strategy: Strategy, output_dir: Path, root: Path, newest: int | None, confirm: Callable[[], object]
) -> Path | None:
    """Write the newest generation to the disk if it is newer than the newest checkpoint there. Collective.

    Args:
        strategy: Strategy that is set up.
        output_dir: Folder of the run, locked by the main process.
        root: Folder in host memory.
        newest: Step of that checkpoint; None if there is none.
        confirm: See `write_checkpoint`.

    Returns:
        Folder of the new checkpoint; None if there is no such generation.

    Raises:
        SaveError: If it cannot be written.
    """
    collectives = strategy.collectives
    marker = collectives.on_main(lambda: read_marker(output_dir))
    if marker is None:
        return None
    search = _search(strategy, marker.folder(root), newest)
    chosen = search.choice.generation
    if collectives.is_main:
        otherwise = "the start" if newest is None else f"the checkpoint of step {newest}"
        instead = otherwise if chosen is None else f"the copies of step {chosen.step}"
        if search.finds_nothing:
            logger.info("no copy of the state is left in memory; the run resumes from %s", instead)
        for reason in search.refused:
            logger.warning("%s; the run resumes from %s", reason, instead)
    if chosen is None:
        return None
    holders, own = search.choice.holders, search.found[collectives.rank]
    try:
        directory = _write_out(strategy, output_dir, chosen, holders, {} if own is None else own.places, confirm)
    except CutOffError:
        raise
    except OSError as error:
        raise SaveError(
            f"the copies of step {chosen.step} in memory cannot be written to {output_dir}: {error}; make room there "
            "and start again, or give them up with resume_from_checkpoint=<a checkpoint>"
        ) from error
    if collectives.is_main:
        size = sum(entry.size for entry in chosen.files.values())
        hosts = {each.host: None for rank in sorted({*holders.values()}) if (each := search.found[rank]) is not None}
        logger.info("wrote %s (%s) from the memory of %s", directory, format_size(size), join_names(hosts))
    return directory


class _Search(NamedTuple):
    """What was found in the memory of machines.

    Attributes:
        choice: The newest generation that can be used.
        found: What each rank has found of it.
        refused: A sentence for each newer generation that cannot be used.
        finds_nothing: Whether no copy is left, not even one older than the newest checkpoint.
    """

    choice: Choice
    found: Sequence[Generation | None]
    refused: Sequence[str]
    finds_nothing: bool


def _search(strategy: Strategy, folder: Path, newest: int | None) -> _Search:
    """Find the newest generation that can be used; older ones are not read. Collective.

    Args:
        strategy: The strategy.
        folder: Folder of the run's copies, in the memory of each machine.
        newest: See `recover`.
    """
    collectives, is_reader = strategy.collectives, strategy.collectives.is_local_main
    listed = collectives.gather_object(list_generations(folder) if is_reader else [])
    newer, refused = newer_generations(listed, newest), list[str]()
    finds_nothing = newer_generations(listed, None) == newer
    for name in newer:
        found = collectives.gather_object(read_generation(folder, name) if is_reader else None)
        choice = choose(found)
        finds_nothing = finds_nothing and not any(found)
        if choice.generation is not None:
            return _Search(choice, found, refused, finds_nothing)
        refused += [choice.refused] if choice.refused else []
    return _Search(Choice(None, {}, ""), [], refused, finds_nothing)


def newest_step(output_dir: Path) -> int | None:
    """Return the step of the newest checkpoint in a folder, which may be damaged; None if there is none."""
    there = [each for each in find_checkpoints(output_dir) if (each / MANIFEST_NAME).is_file()]
    return int(there[-1].name.removeprefix(CHECKPOINT_PREFIX)) if there else None


def _write_out(
    strategy: Strategy,
    output_dir: Path,
    generation: Generation,
    holders: Mapping[str, int],
    places: Mapping[str, Path],
    confirm: Callable[[], object],
) -> Path:
    """Write a generation as a checkpoint; each machine writes the files that it holds. Collective.

    Raises:
        OSError: If a file cannot be read or written, or is damaged; raised on all processes.
    """
    collectives = strategy.collectives

    def begin() -> Path:
        confirm()
        return open_staging(output_dir, f"{CHECKPOINT_PREFIX}{generation.step}").absolute()

    staging = collectives.on_main(begin)
    problems = collectives.gather_object(_write_files(strategy, staging, generation.files, holders, places))

    def commit() -> Path:
        try:
            for rank, problem in enumerate(problems):
                if problem is not None:
                    raise OSError(f"{collectives.describe_rank(rank)}: {problem}")
            content = Snapshot(generation.step, generation.world_size, None, {}, None, {}, {}, {})
            return commit_staging(staging, generation.files, content, confirm)
        except BaseException:
            remove_folder(staging)
            raise

    return collectives.on_main(commit)


def _write_files(
    strategy: Strategy,
    staging: Path,
    files: Mapping[str, FileEntry],
    holders: Mapping[str, int],
    places: Mapping[str, Path],
) -> str | None:
    """Write this machine's files of a generation, and send those for which it cannot. Collective.

    Returns:
        Why a file could not be written; None if all are.
    """
    collectives, session, problem = strategy.collectives, strategy.session, None
    can_write = collectives.gather_object(os.access(staging, os.W_OK))
    writers = [rank for rank in session.find_readers(staging) if can_write[rank]]
    for name, holder in sorted(holders.items()):
        entry, target = files[name], staging / name
        try:
            if holder not in writers:
                session.bring_to_main(places.get(name, target), holder, target, entry.size)
                if collectives.is_main:
                    flush_file(target)
                    _compare(target, FileEntry(target.stat().st_size, checksum(target)), entry)
            elif collectives.rank == holder:
                make_folders(target.parent)
                _compare(places[name], _copy(places[name], target), entry)
        except OSError as error:
            problem = problem or str(error)
    return problem


def _copy(source: Path, target: Path) -> FileEntry:
    with open(source, "rb") as file:
        return write_file(target, iter(lambda: file.read(_PIECE_BYTES), b""))


def _compare(path: Path, found: FileEntry, expected: FileEntry) -> None:
    if found != expected:
        raise OSError(f"{path} is damaged: its checksum is {found.checksum} instead of {expected.checksum}")
