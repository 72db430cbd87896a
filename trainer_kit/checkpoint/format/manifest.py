"""`Manifest`: the list of a checkpoint's files, written last; a folder without one is no checkpoint."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
import xxhash

from trainer_kit._version import __version__
from trainer_kit.checkpoint.format.json_files import checksum, inside, read_json
from trainer_kit.errors import CheckpointError, UnreadableError

FORMAT_VERSION = 2
MANIFEST_NAME = "manifest.json"
ARGUMENTS_NAME = "arguments.json"
STATE_FOLDER = "state"
CHECKPOINT_PREFIX = "checkpoint-"
STAGING_PREFIX = ".staging-"
REPLACED_PREFIX = ".replaced-"
_CHECKSUM = "[0-9a-f]{16}"


@dataclasses.dataclass(frozen=True)
class FileEntry:
    """Size in bytes and XXH3 64-bit checksum (hexadecimal) of one file."""

    size: int
    checksum: str

    def __post_init__(self) -> None:
        if not (_is_count(self.size) and isinstance(self.checksum, str) and re.fullmatch(_CHECKSUM, self.checksum)):
            raise TypeError(f"a file has size={self.size!r:.50} and checksum={self.checksum!r:.50}")


@dataclasses.dataclass(frozen=True)
class Manifest:
    """Content of a checkpoint.

    Attributes:
        step: Number of optimizer steps taken.
        world_size: Number of processes of the run.
        files: All other files, by path relative to the checkpoint's folder, with forward slashes.
        torch_version: Version of torch that wrote the checkpoint.
        trainer_kit_version: Version of trainer_kit that wrote the checkpoint.
        time: Time of writing, in UTC, as ISO 8601.
        format_version: Version of the format.
        membership: Number of the machines' membership in an elastic run; None for any other run, whose file
            leaves it out.
    """

    step: int
    world_size: int
    files: Mapping[str, FileEntry]
    torch_version: str
    trainer_kit_version: str
    time: str
    format_version: int = FORMAT_VERSION
    membership: int | None = None

    def __post_init__(self) -> None:
        if not (_is_count(self.step) and _is_count(self.world_size)):
            raise TypeError(f"step={self.step!r:.50} or world_size={self.world_size!r:.50} is no number")
        if not all(isinstance(text, str) for text in (self.torch_version, self.trainer_kit_version, self.time)):
            raise TypeError("a version or the time is no text")
        if not (self.membership is None or _is_count(self.membership)):
            raise TypeError(f"membership={self.membership!r:.50} is no number")
        datetime.fromisoformat(self.time)

    @classmethod
    def of(cls, files: Mapping[str, FileEntry], step: int, world_size: int, membership: int | None = None) -> Manifest:
        """Create the manifest of these files, with the present time and versions.

        Args:
            files: Entries by relative path.
            step: Number of optimizer steps taken.
            world_size: Number of processes of the run.
            membership: See `Manifest`.
        """
        return cls(
            step=step,
            world_size=world_size,
            files=dict(sorted(files.items())),
            torch_version=str(torch.__version__),
            trainer_kit_version=__version__,
            time=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            membership=membership,
        )

    def to_json(self) -> dict[str, Any]:
        """Return the content of `manifest.json`, with its own checksum."""
        content = dataclasses.asdict(self)
        if self.membership is None:  # as versions before it wrote
            del content["membership"]
        return {**content, "checksum": _content_checksum(content)}

    @classmethod
    def read(cls, directory: Path) -> Manifest:
        """Read the manifest of a checkpoint.

        Raises:
            CheckpointError: If the manifest is missing, damaged or of another format version.
        """
        path = inside(directory, MANIFEST_NAME)
        if not directory.is_dir():
            what = "is a file, not a checkpoint's folder" if directory.exists() else "does not exist"
            raise CheckpointError(f"{directory} {what}")
        if not path.exists():
            raise CheckpointError(f"{directory} has no {MANIFEST_NAME}: it is no checkpoint, or was not written whole")
        content = read_json(path)
        if not isinstance(content, dict) or content.pop("checksum", None) != _content_checksum(content):
            raise CheckpointError(f"{path} is damaged: its content differs from its checksum")
        version = content.get("format_version")
        if version != FORMAT_VERSION:
            raise UnreadableError(
                f"{path} is of format version {version!r:.50}, this trainer_kit reads version {FORMAT_VERSION}; "
                f"use the trainer_kit that wrote it ({content.get('trainer_kit_version')!r:.50})"
            )
        try:
            files = {name: FileEntry(**entry) for name, entry in content.pop("files").items()}
            return cls(**content, files=files)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(f"{path} is no manifest: {str(error)!r:.200}") from error

    def check(self, directory: Path, names: Iterable[str] | None = None) -> None:
        """Compare files on the disk with this manifest.

        Args:
            directory: Folder of the checkpoint.
            names: Names of the files to compare; None: all.

        Raises:
            CheckpointError: If a file is missing, is a link, or has another size or checksum.
        """
        paths = self.check_sizes(directory, names)
        for path, found in zip(paths, _entries(paths), strict=True):
            if found != paths[path]:
                raise CheckpointError(
                    f"{path} is damaged: its checksum is {found.checksum} instead of {paths[path].checksum}"
                )

    def check_sizes(self, directory: Path, names: Iterable[str] | None = None) -> dict[Path, FileEntry]:
        """Compare the sizes of files on the disk with this manifest, without reading the files.

        Args:
            directory: Folder of the checkpoint.
            names: Names of the files to compare; None: all.

        Returns:
            The expected entry of each file, by path.

        Raises:
            CheckpointError: If a file is missing, is a link, or has another size.
        """
        paths = {inside(directory, name): self.files[name] for name in (self.files if names is None else names)}
        for path, expected in paths.items():
            _check_size(path, expected)
        return paths


def list_files(directory: Path) -> list[Path]:
    """Return all files under a folder, sorted.

    Raises:
        CheckpointError: If the folder holds something other than plain files and folders.
    """
    files = []
    for path in sorted(directory.rglob("*")):
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            raise CheckpointError(f"{path} is neither a plain file nor a folder, which a checkpoint may not hold")
        if path.is_file():
            files.append(path)
    return files


def _check_size(path: Path, expected: FileEntry) -> None:
    if not path.is_file():
        raise CheckpointError(f"{path} is missing")
    size = path.stat().st_size
    if size != expected.size:
        problem = "truncated" if size < expected.size else "damaged"
        raise CheckpointError(f"{path} is {problem}: {size} bytes instead of {expected.size}")


def _entry(path: Path) -> FileEntry:
    try:
        return FileEntry(path.stat().st_size, checksum(path))
    except OSError as error:
        raise UnreadableError(f"{path} cannot be read: {error.strerror}") from error


def _entries(paths: Iterable[Path]) -> list[FileEntry]:
    """Return the entry of each path, in parallel: reading and hashing release the GIL."""
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        return list(pool.map(_entry, paths))


def _content_checksum(content: Mapping[str, Any]) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return xxhash.xxh3_64(text.encode()).hexdigest()


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0
