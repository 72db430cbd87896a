"""The manifest: what a checkpoint holds, written last, without which a checkpoint does not exist."""

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
_CHECKSUM = re.compile("[0-9a-f]{16}")


@dataclasses.dataclass(frozen=True)
class FileEntry:
    """Size in bytes and XXH3 64-bit checksum (hexadecimal) of one file."""

    size: int
    checksum: str

    def __post_init__(self) -> None:
        if not (_is_count(self.size) and isinstance(self.checksum, str) and _CHECKSUM.fullmatch(self.checksum)):
            raise TypeError(f"a file has size={self.size!r:.50} and checksum={self.checksum!r:.50}")


@dataclasses.dataclass(frozen=True)
class Manifest:
    """What a checkpoint holds.

    Attributes:
        step: Optimizer steps taken.
        world_size: Processes that wrote it.
        files: Every other file, by its path from the checkpoint's folder with forward slashes.
        torch_version: Version of torch that wrote it.
        trainer_kit_version: Version of trainer_kit that wrote it.
        time: When, in UTC, as ISO 8601.
        format_version: Version of the layout.
    """

    step: int
    world_size: int
    files: Mapping[str, FileEntry]
    torch_version: str
    trainer_kit_version: str
    time: str
    format_version: int = FORMAT_VERSION

    def __post_init__(self) -> None:
        if not (_is_count(self.step) and _is_count(self.world_size)):
            raise TypeError(f"step={self.step!r:.50} or world_size={self.world_size!r:.50} is no number")
        if not all(isinstance(text, str) for text in (self.torch_version, self.trainer_kit_version, self.time)):
            raise TypeError("a version or the time is no text")
        datetime.fromisoformat(self.time)

    @classmethod
    def of(cls, files: Mapping[str, FileEntry], step: int, world_size: int) -> Manifest:
        """The manifest of these files, written now by this process."""
        return cls(
            step=step,
            world_size=world_size,
            files=dict(sorted(files.items())),
            torch_version=str(torch.__version__),
            trainer_kit_version=__version__,
            time=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        )

    def to_json(self) -> dict[str, Any]:
        """What `manifest.json` holds, with a checksum of that itself."""
        content = dataclasses.asdict(self)
        return {**content, "checksum": _content_checksum(content)}

    @classmethod
    def read(cls, directory: Path) -> Manifest:
        """Reads the manifest of a checkpoint.

        Raises:
            CheckpointError: If there is none, it is damaged or of another format version.
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
        """Compares files on the disk with this manifest: all of them, or those in `names`.

        Raises:
            CheckpointError: If one is missing, a link, of another size or another checksum.
        """
        paths = self.check_sizes(directory, names)
        for path, found in zip(paths, _entries(paths), strict=True):
            if found != paths[path]:
                raise CheckpointError(
                    f"{path} is damaged: its checksum is {found.checksum} instead of {paths[path].checksum}"
                )

    def check_sizes(self, directory: Path, names: Iterable[str] | None = None) -> dict[Path, FileEntry]:
        """Compares the sizes of files on the disk with this manifest, which reads none of them.

        Returns:
            What each file should be, by its path.

        Raises:
            CheckpointError: If one is missing, a link or of another size.
        """
        paths = {inside(directory, name): self.files[name] for name in (self.files if names is None else names)}
        for path, expected in paths.items():
            _check_size(path, expected)
        return paths


def list_files(directory: Path) -> list[Path]:
    """All files under a folder, sorted.

    Raises:
        CheckpointError: If something in it is neither a plain file nor a folder.
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
    """The entry of every path, several at a time: reading and hashing let other threads run."""
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        return list(pool.map(_entry, paths))


def _content_checksum(content: Mapping[str, Any]) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return xxhash.xxh3_64(text.encode()).hexdigest()


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0
