"""The file of a `RunLock`: reads, creates and removes it, so that two processes never both have it."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
import time
import uuid
from pathlib import Path
from typing import Any, NamedTuple


class Holder(NamedTuple):
    """Holder of a folder's lock.

    Attributes:
        token: Unique ID of the lock.
        user: Name of the user.
        host: Host name.
        system: Boot ID and PID namespace, which distinguish systems with the same host name.
        process: PID of the process.
        started: Start time of the process as the system reports it; None if unknown.
        since: Time of the lock, in seconds since 1970.
        membership: ID of an elastic run and number of its machines' membership; None for any other run.
    """

    token: str
    user: str
    host: str
    system: str
    process: int
    started: str | None
    since: float
    membership: tuple[str, int] | None = None

    def __str__(self) -> str:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since))
        return f"{self.user} on {self.host} (process {self.process}), since {since}"


class Seen(NamedTuple):
    """A lock as read: holder (None if the content is truncated), content, and modification time."""

    holder: Holder | None
    content: bytes
    written: float

    @property
    def token(self) -> str | None:
        return None if self.holder is None else self.holder.token

    @property
    def name(self) -> str:
        return "a training that is not known" if self.holder is None else str(self.holder)


def look(path: Path) -> Seen | None:
    """Read the lock; return None if there is none."""
    try:
        with open(opened(path, os.O_RDONLY), "rb") as file:  # opening refreshes a network file system's cache
            return parsed(file.read(), os.fstat(file.fileno()).st_mtime)
    except FileNotFoundError:
        return None


def opened(path: Path, flags: int) -> int:
    """Open a plain file, without following a link or waiting for a pipe."""
    for name in ("O_NOFOLLOW", "O_NONBLOCK", "O_BINARY"):  # not on every system
        flags |= getattr(os, name, 0)
    descriptor = os.open(path, flags)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is no plain file", str(path))
    return descriptor


def parsed(content: bytes, written: float) -> Seen:
    """Return a lock by its content and modification time."""
    try:
        values = json.loads(content)
        values["membership"] = values.get("membership") and tuple(values["membership"])
        return Seen(Holder(**{name: values[name] for name in Holder._fields}), content, written)
    except (ValueError, KeyError, TypeError, AttributeError):
        return Seen(None, content, written)


def write_new(path: Path, holder: Holder) -> None:
    """Create the lock exclusively; atomically with its content if the file system supports hard links."""
    ready = path.with_name(f"{path.name}-{uuid.uuid4().hex}")
    _write_whole(ready, holder)
    try:
        os.link(ready, path)
    except FileExistsError:
        raise
    except OSError:
        _write_whole(path, holder)
    finally:
        ready.unlink(missing_ok=True)


def _write_whole(path: Path, holder: Holder) -> None:
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
    try:
        os.write(descriptor, content_of(holder))
    except OSError:
        os.unlink(path)
        raise
    finally:
        os.close(descriptor)


def remove(path: Path, dead: Seen) -> None:
    """Remove a dead holder's lock; restore a new lock that was created between the look and the rename."""
    if look(path) != dead:
        return
    aside = path.with_name(f"{path.name}-{uuid.uuid4().hex}")
    try:
        os.rename(path, aside)
    except FileNotFoundError:
        return
    found = look(aside)
    if found is not None and found.content != dead.content:
        try:
            os.link(aside, path)
        except OSError:  # a new lock exists, or no support for hard links
            if not path.exists():
                os.rename(aside, path)
    aside.unlink(missing_ok=True)


def remove_leftovers(lock: Path, seconds: float) -> None:
    """Remove the temporary files of killed processes for this lock.

    Args:
        lock: The lock.
        seconds: Age from which on they are removed.
    """
    for path in lock.parent.glob(f"{lock.name}-*"):
        with contextlib.suppress(OSError):
            if time.time() - path.lstat().st_mtime >= seconds:
                path.unlink()


def content_of(holder: Holder) -> bytes:
    """Return the lock's content, of the same length for a holder and membership, so that it is overwritten in place."""
    values: dict[str, Any] = {**holder._asdict(), "beat": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
    return json.dumps(values).encode() + b"\n"
