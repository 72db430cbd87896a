"""Durable files and folders: all writes, fsyncs and renames of a checkpoint.

Errors are OSErrors with the file name and the errno.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import xxhash

from trainer_kit.checkpoint.format.json_files import JSON_BYTES, JSON_VALUES, is_too_large
from trainer_kit.checkpoint.format.manifest import STAGING_PREFIX, FileEntry

_CHUNK_BYTES = 2**22
_SMALL_BYTES = 2**16  # smaller pieces are joined: a copy costs less than a system call
_AHEAD_BYTES = 2**25
# Errors of file systems that do not support an fsync (of folders), or the renaming of folders.
_NO_FSYNC = {errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS}
_NO_RENAME = {errno.EXDEV, errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS}
_NO_RENAME_REMEDY = "the file system forbids it or does not rename folders in one step; use another output_dir"

_logger = logging.getLogger("trainer_kit")
_warned: set[tuple[Path, str]] = set()


def write_file(path: Path, pieces: Iterable[bytes | memoryview]) -> FileEntry:
    """Write a file atomically, and flush its content to the disk.

    Args:
        path: The file; an existing one is replaced. Its name is durable only after `fsync_directory`.
        pieces: The content in order, as bytes; each piece is requested when the previous ones are written.

    Returns:
        Size and checksum of the file.

    Raises:
        OSError: If the disk is full or cannot be written.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with _naming(temporary):
            entry = _write_new(temporary, pieces)
            os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    return entry


def write_json(path: Path, value: Any, indent: int | None = 2) -> FileEntry:
    """Write strict JSON as `write_file` does.

    Args:
        path: The file.
        value: The JSON tree.
        indent: Spaces of indentation; None: all on one line.

    Raises:
        ValueError: If the JSON is larger than `read_json` accepts.
        OSError: If the disk is full or cannot be written.
    """
    content = (json.dumps(value, indent=indent, allow_nan=False) + "\n").encode()
    if is_too_large(content):
        raise ValueError(
            f"{path} would hold more than {JSON_BYTES} bytes or {JSON_VALUES} values; keep long lists as tensors"
        )
    return write_file(path, [content])


def make_folders(directory: Path) -> None:
    """Create a folder and its parents if they are missing."""
    os.makedirs(directory, exist_ok=True)


def make_run_folder(directory: Path) -> None:
    """Create the folder of a run and its parents, and flush the new entries to the disk."""
    missing = [each for each in (directory, *directory.parents) if not each.exists()]
    make_folders(directory)
    for each in reversed(missing):
        # Parents may not be readable, and are outside of the run.
        with contextlib.suppress(OSError), _opened(each.parent) as descriptor:
            os.fsync(descriptor)


def make_writable_folder(path: str | Path) -> Path:
    """Create a folder if it is missing, check that it is writable, and return it.

    Raises:
        ValueError: If the folder cannot be written.
    """
    folder = Path(path)
    try:
        make_run_folder(folder)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"x")
    except OSError as error:
        raise ValueError(f"output_dir={str(path)!r} cannot be written: {error}") from error
    return folder


def fsync_directory(directory: Path) -> None:
    """Flush the entries of a folder to the disk."""
    if os.name == "nt":  # Windows cannot open folders, and need not
        return
    with _naming(directory), _opened(directory) as descriptor:
        _fsync(descriptor, directory)


def flush_file(path: Path) -> None:
    """Flush a file that other code has written to the disk."""
    if os.name == "nt":  # Windows flushes only what is open for writing
        return
    with _naming(path), _opened(path) as descriptor:
        _fsync(descriptor, path)


def rename_folder(source: Path, target: Path) -> None:
    """Rename a folder, and check that the file system does it atomically.

    A file system that copies and deletes instead is detected if it fails, leaves the source, or changes the inode.

    Raises:
        OSError: If the folder cannot be renamed, or the result is incomplete.
    """
    number, names = os.stat(source).st_ino, set(os.listdir(source))
    try:
        os.rename(source, target)
    except OSError as error:
        if error.errno not in _NO_RENAME:
            raise
        reason = f"{error.strerror} ({_NO_RENAME_REMEDY})"
        raise OSError(error.errno, reason, str(source), None, str(target)) from error
    if os.path.lexists(source) or set(os.listdir(target)) != names:
        raise OSError(errno.EIO, f"Not renamed as a whole ({_NO_RENAME_REMEDY})", str(source), None, str(target))
    if os.stat(target).st_ino != number:
        _warn_once(
            target.parent,
            "a folder that was renamed became another one, so its file system seems to copy instead: a kill at that "
            "moment may leave an incomplete checkpoint, which is skipped for the one before; use another output_dir",
        )


def remove_folder(directory: Path) -> None:
    """Remove a folder; log a warning if that fails."""
    try:
        shutil.rmtree(directory)
    except FileNotFoundError:
        pass
    except OSError as error:
        _logger.warning("%s could not be removed and still takes up disk space: %s", directory, error)


def _write_new(path: Path, pieces: Iterable[bytes | memoryview]) -> FileEntry:
    digest, size, started = xxhash.xxh3_64(), 0, 0
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | getattr(os, "O_BINARY", 0)
    descriptor = os.open(path, flags, 0o666)
    try:
        for chunk in _chunks(pieces):
            digest.update(chunk)
            _write(descriptor, chunk)
            size += len(chunk)
            if size - started >= _AHEAD_BYTES:
                _start_writing(descriptor)
                started = size
        _fsync(descriptor, path)
    finally:
        os.close(descriptor)
    return FileEntry(size, digest.hexdigest())


def _chunks(pieces: Iterable[bytes | memoryview]) -> Iterator[memoryview]:
    """Split and join pieces to chunks of moderate size, without copying large pieces."""
    gathered = bytearray()
    for piece in pieces:
        if len(piece) < _SMALL_BYTES:
            gathered += piece
            if len(gathered) < _CHUNK_BYTES:
                continue
        if gathered:
            yield memoryview(gathered)
            gathered = bytearray()
        if len(piece) >= _SMALL_BYTES:
            view = memoryview(piece)
            yield from (view[start : start + _CHUNK_BYTES] for start in range(0, len(view), _CHUNK_BYTES))
    if gathered:
        yield memoryview(gathered)


def _write(descriptor: int, content: memoryview) -> None:
    """Write all of the content: one system call may write less, as on a nearly full disk."""
    while content:
        written = os.write(descriptor, content)
        if written == 0:
            raise OSError(errno.EIO, "Nothing is written, for no reason given")
        content = content[written:]


def _start_writing(descriptor: int) -> None:
    """Start writing cached data to the disk, so that little of a large file is left for the fsync."""
    if hasattr(os, "posix_fadvise"):
        with contextlib.suppress(OSError):  # only advice
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _fsync(descriptor: int, path: Path) -> None:
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_FSYNC:
            raise
        _warn_once(
            _lasting(path),
            f"its file system does not flush to the disk when asked (fsync: {error.strerror}), so a power cut could "
            "lose the newest checkpoint, and training would resume from the one before",
        )


def _lasting(path: Path) -> Path:
    """Return the permanent folder of a path: the run's folder for a staged file."""
    staging = (folder.parent for folder in (path, *path.parents) if folder.name.startswith(STAGING_PREFIX))
    return next(staging, path if path.is_dir() else path.parent)


def _warn_once(folder: Path, text: str) -> None:
    if (folder, text) not in _warned:
        _warned.add((folder, text))
        _logger.warning("%s: %s", folder, text)


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Add the file name to the errors of calls on a descriptor."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error
