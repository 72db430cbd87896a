"""Reading of JSON files, checksums, and safe paths inside a folder."""

from __future__ import annotations

import json
import math
import os
import stat
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import xxhash

from trainer_kit.errors import CheckpointError, UnreadableError

JSON_BYTES = 2**26
"""Largest size of JSON that is read, in bytes."""

JSON_VALUES = 2**22
"""Largest number of values in JSON that is read; they take up to 40 times the memory of their text."""

_CHUNK_BYTES = 2**20


def read_json(path: Path) -> Any:
    """Return the content of a JSON file.

    Raises:
        CheckpointError: If the file is missing, unreadable, no strict JSON or too large (see `parse_json`).
    """
    try:
        if path.exists() and not path.is_file():
            raise CheckpointError(f"{path} is no plain file")
        with open(path, "rb") as file:
            content = file.read(JSON_BYTES + 1)
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    except OSError as error:
        raise UnreadableError(f"{path} cannot be read: {error.strerror}") from error
    return parse_json(content, path)


def parse_json(content: bytes, path: Path) -> Any:
    """Parse JSON that was read from the file `path`.

    Raises:
        CheckpointError: If it is no strict JSON, or exceeds `JSON_BYTES` or `JSON_VALUES`.
    """
    if is_too_large(content):
        raise CheckpointError(
            f"{path} is not to be trusted: it holds JSON of more than {JSON_BYTES} bytes or {JSON_VALUES} values"
        )
    try:
        return json.loads(content.decode(), parse_constant=_refuse_constant, parse_float=_finite)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged, it holds no valid JSON: {error}") from error


def is_too_large(content: bytes) -> bool:
    """Return whether JSON exceeds `JSON_BYTES` or `JSON_VALUES`."""
    return len(content) > JSON_BYTES or sum(map(content.count, (b",", b"[", b"{"))) > JSON_VALUES


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no number in JSON")


def _finite(text: str) -> float:
    """Parse a number of JSON; refuse one that overflows to infinity, such as 1e999."""
    number = float(text)
    if math.isinf(number):
        raise ValueError(f"{text:.40} is larger than a number can be")
    return number


def checksum(path: Path) -> str:
    """Return the XXH3 64-bit hash of a file's content as 16 hexadecimal digits (https://xxhash.com)."""
    digest, buffer = xxhash.xxh3_64(), memoryview(bytearray(_CHUNK_BYTES))
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
    return digest.hexdigest()


def inside(directory: Path, name: Any, follows_links: bool = False) -> Path:
    """Return the path of a file that a manifest or an index names, which must be inside `directory`.

    Args:
        directory: The folder.
        name: Relative path with forward slashes.
        follows_links: Whether the path may contain links to other folders, as the Hub's cache does.

    Raises:
        CheckpointError: If the name is absolute, leads out of the folder, through a link or to a pipe or device, or is
            not normalized (`a/b`, not `a//b` or `./a/b`).
    """
    if (
        not isinstance(name, str)
        or name in ("", ".")
        or not name.isprintable()
        or "\\" in name
        or PurePosixPath(name).is_absolute()
        or PurePosixPath(name).as_posix() != name
        or PureWindowsPath(name).drive
        or ".." in PurePosixPath(name).parts
    ):
        raise CheckpointError(f"{directory} names the file {name!r}, which does not lie inside it; do not trust it")
    path = directory
    for part in PurePosixPath(name).parts:
        path = path / part
        _refuse_special(path, follows_links)
    return path


def _refuse_special(path: Path, follows_links: bool) -> None:
    """Refuse links, which lead elsewhere, and pipes and devices, which could block."""
    try:
        mode = (os.stat if follows_links else os.lstat)(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return
    except (OSError, ValueError) as error:
        raise UnreadableError(f"{str(path)!r} cannot be read: {error}") from error
    if stat.S_ISLNK(mode):
        raise CheckpointError(f"{path} is a link, which a checkpoint may not hold; put the file itself there")
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise CheckpointError(f"{path} is neither a plain file nor a folder, which a checkpoint may not hold")
