"""Files that are on the disk when a function returns, and names that stay inside their folder."""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import xxhash

_CHUNK_BYTES = 2**22
_logger = logging.getLogger("trainer_kit")


class CheckpointError(ValueError):
    """A checkpoint or one of its files is missing, damaged or not to be trusted; the message names it."""


def write_json(path: Path, value: Any, indent: int | None = 2) -> None:
    """Writes strict JSON and flushes it to the disk."""
    text = json.dumps(value, indent=indent, allow_nan=False) + "\n"
    with open(path, "wb") as file:
        file.write(text.encode())
        file.flush()
        os.fsync(file.fileno())


def read_json(path: Path) -> Any:
    """What a JSON file holds.

    Raises:
        CheckpointError: If the file is missing, cannot be read or is no JSON.
    """
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged, it holds no valid JSON: {error}") from error


def fsync_file(path: Path) -> None:
    """Flushes a file that somebody else wrote to the disk."""
    with open(path, "rb+") as file:
        os.fsync(file.fileno())


def fsync_directory(directory: Path) -> None:
    """Flushes the entries of a folder (which files it holds) to the disk."""
    if os.name == "nt":  # folders cannot be opened there, and need not be
        return
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some network file systems do not know it for folders
            raise
    finally:
        os.close(descriptor)


def remove_folder(directory: Path) -> None:
    """Removes a folder that nobody needs any more; where that fails, a warning says so and the run goes on."""
    try:
        shutil.rmtree(directory)
    except FileNotFoundError:
        pass
    except OSError as error:
        _logger.warning("%s could not be removed and still takes up disk space: %s", directory, error)


def checksum(path: Path) -> str:
    """The XXH3 64-bit hash of a file's content, 16 hexadecimal digits (https://xxhash.com)."""
    digest = xxhash.xxh3_64()
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def inside(directory: Path, name: Any) -> Path:
    """The path of a file that a manifest or an index names, which must lie inside `directory`.

    Raises:
        CheckpointError: If the name is absolute, leads out of the folder or over a link.
    """
    if (
        not isinstance(name, str)
        or name in ("", ".")
        or any(character in name for character in "\\\0")
        or PurePosixPath(name).is_absolute()
        or PureWindowsPath(name).drive
        or ".." in PurePosixPath(name).parts
    ):
        raise CheckpointError(f"{directory} names the file {name!r}, which does not lie inside it; do not trust it")
    path = directory
    for part in PurePosixPath(name).parts:
        path = path / part
        if path.is_symlink():
            raise CheckpointError(f"{path} is a link, which a checkpoint may not hold; put the file itself there")
    return path
