"""Generations: copies of a run's state in the memory of its machines, each a checkpoint whose files lie apart.

A folder of a generation holds the files of one process, in the memory of that process's machine or of another one, and
the manifest of all files. Its name ends in the ranks of the two processes.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import socket
import stat
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from trainer_kit.checkpoint import FileEntry, Manifest, find_checkpoints
from trainer_kit.checkpoint.format.disk import remove_folder, write_json
from trainer_kit.checkpoint.format.json_files import read_json
from trainer_kit.checkpoint.format.manifest import MANIFEST_NAME
from trainer_kit.errors import CheckpointError

logger = logging.getLogger("trainer_kit")

MARKER = ".copies"
"""File in the output folder that says where the copies of its run are in memory."""

_ID = r"[0-9a-f]{32}"
_FOLDER = r"([0-9]+-[0-9a-f]{8})-[0-9]+-[0-9]+"


class Generation(NamedTuple):
    """What one machine holds of a generation.

    Attributes:
        name: Name of the generation, the same on all machines.
        step: Number of optimizer steps taken.
        world_size: Number of processes of the run that made it.
        host: Name of the machine.
        files: Entries of all files of the generation, wherever they lie.
        places: Paths of the files that lie here with the right checksum, by their name.
        problems: What is wrong with files that lie here.
    """

    name: str
    step: int
    world_size: int
    host: str
    files: Mapping[str, FileEntry]
    places: Mapping[str, Path]
    problems: Sequence[str] = ()


class Choice(NamedTuple):
    """A generation of which every file is somewhere.

    Attributes:
        generation: What one of the machines holds of it; None if it cannot be used.
        holders: Rank of a process whose machine has each file.
        refused: Why it cannot be used; "" if it can, or no machine holds a part of it.
    """

    generation: Generation | None
    holders: Mapping[str, int]
    refused: str


def newer_generations(listed: Sequence[Sequence[str]], newest_on_disk: int | None) -> list[str]:
    """Return the names of the generations that are newer than the newest checkpoint, newest first.

    Args:
        listed: Names of the generations of which the memory of each rank's machine holds a part.
        newest_on_disk: Step of the newest checkpoint on the disk; None if there is none.
    """
    names = {name for each in listed for name in each if newest_on_disk is None or step_of(name) > newest_on_disk}
    return sorted(names, key=lambda name: (step_of(name), name), reverse=True)


def choose(found: Sequence[Generation | None]) -> Choice:
    """Return how a generation can be used, if it is complete.

    Args:
        found: What each rank has found of it in the memory of its machine.
    """
    by_rank = {rank: each for rank, each in enumerate(found) if each is not None}
    if not by_rank:
        return Choice(None, {}, "")
    first = next(iter(by_rank.values()))
    holders = _holders(first.files, by_rank)
    missing = sorted(first.files.keys() - holders.keys())
    if not missing:
        return Choice(first, holders, "")
    problems = [problem for each in by_rank.values() for problem in each.problems]
    why = "; ".join(problems) or f"no machine that is here has {missing[0]}"
    return Choice(None, {}, f"the copies of step {first.step} cannot be used: {why}")


def _holders(files: Mapping[str, FileEntry], by_rank: Mapping[int, Generation]) -> dict[str, int]:
    """Return a rank for each file that one has, so that all have about as many bytes to write."""
    loads = dict.fromkeys(by_rank, 0)
    holders = {}
    for name in sorted(files, key=lambda name: (-files[name].size, name)):
        there = [rank for rank, each in by_rank.items() if name in each.places]
        if there:
            holders[name] = rank = min(there, key=lambda rank: (loads[rank], rank))
            loads[rank] += files[name].size
    return holders


class Marker(NamedTuple):
    """Where the copies of a run are in memory.

    Attributes:
        folder_id: ID of the output folder, which its starts share.
        start_id: ID of one start of the run, or of what follows a rollback: what was before must not come back.
        output_dir: Path of the output folder, since a copy of it has the same marker.
    """

    folder_id: str
    start_id: str
    output_dir: str

    @classmethod
    def after(cls, earlier: Marker | None, output_dir: Path) -> Marker:
        """Return the marker of a new start.

        Args:
            earlier: The marker of the folder's last start; None if there is none.
            output_dir: The output folder.
        """
        folder_id = uuid.uuid4().hex if earlier is None else earlier.folder_id
        return cls(folder_id, uuid.uuid4().hex, str(output_dir.resolve()))

    def folder(self, root: Path) -> Path:
        """Return the folder of the copies of this start.

        Args:
            root: Folder in host memory, which may serve several users and runs.
        """
        return root / f"trainer_kit-{self.folder_id}-{self.start_id}"

    def others(self, root: Path) -> list[Path]:
        """Return the folders of other starts in host memory."""
        found = root.glob(f"trainer_kit-{self.folder_id}-*")
        return [path for path in found if path != self.folder(root) and _is_own(path)]


def step_of(generation: str) -> int:
    """Return the number of optimizer steps taken, from the name of a generation."""
    return int(generation.partition("-")[0])


def make_private_folder(folder: Path) -> None:
    """Create the folder of a run's copies, which only this user may enter.

    Raises:
        OSError: If it cannot be created, or belongs to another user.
    """
    with contextlib.suppress(FileExistsError):
        os.mkdir(folder, 0o700)
    if not _is_own(folder):
        raise OSError(f"{folder} is no folder of this user")


def _is_own(folder: Path) -> bool:
    status = os.lstat(folder)
    return stat.S_ISDIR(status.st_mode) and not (hasattr(os, "getuid") and status.st_uid != os.getuid())


def folder_name(generation: str, owner: int, holder: int) -> str:
    """Return the name of the folder with the files of one process, in the memory of a process's machine."""
    return f"{generation}-{owner}-{holder}"


def holder_of(folder: Path) -> int:
    """Return the rank of the process that wrote the folder of a generation."""
    return int(folder.name.rpartition("-")[2])


def folders_of(folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield the name of the generation and the path of each folder in that of a run."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        for path in sorted(folder.iterdir()):
            if (match := re.fullmatch(_FOLDER, path.name)) and path.is_dir() and not path.is_symlink():
                yield match[1], path


def list_generations(folder: Path) -> list[str]:
    """Return the names of the generations of which the memory of this machine holds a part.

    Args:
        folder: Folder of the run's copies.
    """
    if not (os.path.lexists(folder) and _is_own(folder)):
        return []
    # Without a manifest, a process was killed while it wrote, or received.
    return sorted({name for name, path in folders_of(folder) if (path / MANIFEST_NAME).is_file()})


def read_generation(folder: Path, name: str) -> Generation | None:
    """Return what the memory of this machine holds of a generation; every file is compared with its checksum.

    Args:
        folder: Folder of the run's copies.
        name: Name of the generation.

    Returns:
        What it holds; None if that is nothing.
    """
    found: Generation | None = None
    if not (os.path.lexists(folder) and _is_own(folder)):
        return None
    for path in (path for each, path in folders_of(folder) if each == name):
        try:
            manifest = Manifest.read(path)
        except CheckpointError as error:  # a process was killed while it wrote, or received
            logger.debug("%s is left out: %s", path, error)
            continue
        places, problems = _check(path, manifest)
        if found is not None:
            places, problems = {**places, **found.places}, [*found.problems, *problems]
        found = Generation(
            name, manifest.step, manifest.world_size, socket.gethostname(), manifest.files, places, problems
        )
    return found


def _check(folder: Path, manifest: Manifest) -> tuple[dict[str, Path], list[str]]:
    """Return the paths of intact files of a folder by name, and what is wrong with others."""
    names = [name for name in manifest.files if (folder / name).is_file()]

    def problem(name: str) -> str | None:
        try:
            manifest.check(folder, [name])
        except CheckpointError as error:
            return f"{error} ({socket.gethostname()})"
        return None

    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        problems = dict(zip(names, pool.map(problem, names), strict=True))
    intact = {name: folder / name for name, found in problems.items() if found is None}
    return intact, [found for found in problems.values() if found is not None]


def read_marker(output_dir: Path) -> Marker | None:
    """Return where copies of the folder's run may be in memory; None if there are none."""
    path = output_dir / MARKER
    if not path.exists():
        return None
    try:
        content = read_json(path)
    except CheckpointError as error:
        logger.warning("copies in memory are not looked for: %s", error)
        return None
    if not isinstance(content, dict) or not all(isinstance(content.get(name), str) for name in Marker._fields):
        return None
    marker = Marker(*(content[name] for name in Marker._fields))
    if not (re.fullmatch(_ID, marker.folder_id) and re.fullmatch(_ID, marker.start_id)):
        return None
    if marker.output_dir != str(output_dir.resolve()):
        logger.info("copies in memory belong to %s, not to %s: they are not used", marker.output_dir, output_dir)
        return None
    return marker


def write_marker(output_dir: Path, marker: Marker) -> None:
    """Say in the output folder where the copies of its run are in memory.

    Raises:
        OSError: If the disk is full or cannot be written.
    """
    write_json(output_dir / MARKER, marker._asdict())


def has_state(output_dir: Path) -> bool:
    """Return whether a run has checkpoints in a folder, or copies in memory."""
    return bool(find_checkpoints(output_dir)) or (output_dir / MARKER).exists()


def remove_marker(output_dir: Path) -> None:
    """Forget the copies of the folder's run in memory, which are removed."""
    (output_dir / MARKER).unlink(missing_ok=True)


def give_up_copies(output_dir: Path) -> None:
    """Let the copies of the folder's run in memory not come back; the next start that makes copies removes them."""
    if (marker := read_marker(output_dir)) is not None:
        write_marker(output_dir, Marker.after(marker, output_dir))


def remove_generations(folders: Iterable[Path]) -> None:
    """Remove folders of generations."""
    for folder in folders:
        remove_folder(folder)


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest of a whole generation into a folder that holds some of its files, last.

    Raises:
        OSError: If the memory is full.
    """
    write_json(folder / MANIFEST_NAME, manifest.to_json())
