"""`RunLock`: one training at a time in a folder, across processes and machines.

The file `.lock` in the folder names its holder: user, host, process and start of the lock. The holder rewrites it every
few seconds as a heartbeat. A holder on this machine is dead if its process has ended. A holder on another machine is
dead if its heartbeat stops for some time, by the clock of the watching process. The lock of a killed run therefore
blocks no later run. Neither `flock` nor synchronized clocks are needed, only a file system with exclusive creation and
atomic renames of files.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import socket
import stat
import threading
import time
import uuid
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from trainer_kit.errors import FolderInUseError
from trainer_kit.utils.process_identity import is_stopped, start_time, system_id, user_name
from trainer_kit.utils.units import format_duration

logger = logging.getLogger("trainer_kit")

NAME = ".lock"
"""The lock's name in the folder of a run."""

BEAT_SECONDS = 10.0
"""Seconds between two heartbeats."""

DEAD_AFTER = 120.0
"""Seconds without a heartbeat after which a holder on another machine counts as dead."""

_LOOK_SECONDS = 0.5
_ENDED = (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
_held: dict[str, int] = {}  # PID by token of this process's locks: a fork inherits the dict, not the locks


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


class RunLock:
    """Lock of a folder for a training, used only by the run's main process.

    Args:
        folder: The folder, which must exist when the lock is acquired.
        argument: Name of the argument that the user gives the folder by, for errors.
        name: Name of the lock's file.
        membership: See `Holder`.
    """

    def __init__(
        self,
        folder: Path,
        argument: str = "output_dir",
        name: str = NAME,
        membership: tuple[str, int] | None = None,
    ) -> None:
        self._membership = membership
        self.folder = folder
        self.argument = argument
        self.path = folder / name
        self._holder: Holder | None = None  # None while the lock is not held
        self._taken_by: str | None = None
        self._failed = 0  # consecutive failed heartbeats
        self._ended = threading.Event()
        self._beating = threading.Lock()

    @property
    def is_held(self) -> bool:
        """Whether this process has acquired the lock and not released it."""
        return self._holder is not None and self._holder.process == os.getpid()

    @property
    def is_inherited(self) -> bool:
        """Whether this process was forked from the holder, which holds the lock still."""
        holder = self._holder
        if holder is None or holder.process == os.getpid():
            return False
        with contextlib.suppress(OSError):
            return (seen := _look(self.path)) is not None and seen.token == holder.token
        return False

    def acquire(self) -> None:
        """Acquire the lock; wait if a holder on another machine may be dead.

        Raises:
            FolderInUseError: If another training holds the folder.
            OSError: If the lock cannot be written.
        """
        watched: _Watched | None = None
        while not self._is_taken(is_contended=watched is not None):
            if (seen := self._look()) is None:
                time.sleep(_LOOK_SECONDS / 10)
                continue
            if watched is None or watched.first.token != seen.token:
                watched = _Watched(seen, time.monotonic())
            lives = not self._replaces(seen.holder) and watched.lives(seen)
            if lives:
                raise FolderInUseError(self._refusal(seen))
            if lives is None:
                if seen is watched.first:
                    logger.warning(
                        "%s is held by %s; waiting to see whether it goes on (after %.0f s without a sign of life it "
                        "counts as dead)", self.folder, seen.name, watched.patience,
                    )  # fmt: skip
                time.sleep(_LOOK_SECONDS)
            else:
                _remove(self.path, seen)
        _remove_leftovers(self.path)
        self._ended = threading.Event()
        threading.Thread(target=self._beat_on, args=(self._ended,), name="run lock", daemon=True).start()

    def renew(self, membership: tuple[str, int] | None) -> None:
        """Hold the lock in the name of a later membership of the run.

        Raises:
            FolderInUseError: If another training took the folder.
            OSError: If the lock cannot be written.
        """
        assert self._holder is not None, "acquire() comes first"
        self._membership = membership
        with self._beating:
            self._holder = self._holder._replace(membership=membership)
        self.confirm()

    def release(self) -> None:
        """Release the lock if this process holds it."""
        holder, self._holder = self._holder, None
        if holder is None or holder.process != os.getpid():  # inherited by a fork
            return
        self._ended.set()
        with self._beating, contextlib.suppress(OSError):
            if (seen := _look(self.path)) is not None and seen.token == holder.token:
                os.unlink(self.path)
        _held.pop(holder.token, None)  # a file that stays counts as a dead holder's

    def check(self) -> None:
        """Check without file access that the folder is still held.

        Raises:
            FolderInUseError: If another training took the folder while this process was stopped.
        """
        if self._taken_by is not None:
            raise FolderInUseError(
                f"{self.folder} was taken over by {self._taken_by}, since this process gave no sign of life for "
                f"{format_duration(DEAD_AFTER)}; nothing more is written there"
            )

    def confirm(self) -> None:
        """Check in the file that the folder is still held, before a write there.

        Raises:
            FolderInUseError: If another training took the folder.
            OSError: If the lock cannot be read or written.
        """
        self._write_sign()
        self.check()

    def _is_taken(self, is_contended: bool) -> bool:
        """Try to create the lock; return whether this process holds it.

        If several processes remove a dead lock at the same time, one of them may remove this lock: hence a second look.
        """
        token, process = uuid.uuid4().hex, os.getpid()
        where = socket.gethostname(), system_id(), process, start_time(process)
        holder = Holder(token, user_name(), *where, time.time(), self._membership)
        _held[token] = process  # before other threads can see the lock
        try:
            _write_new(self.path, holder)
            if is_contended:
                time.sleep(_LOOK_SECONDS)
                if (seen := self._look()) is None or seen.token != token:
                    return False
            self._holder = holder
        except FileExistsError:
            return False
        finally:
            if self._holder is not holder:
                del _held[token]
        return True

    def _replaces(self, holder: Holder | None) -> bool:
        """Return whether a holder belongs to an earlier membership: cut off, it notices before its next write."""
        before, now = holder and holder.membership, self._membership
        return before is not None and now is not None and before[0] == now[0] and before[1] < now[1]

    def _look(self) -> _Seen | None:
        try:
            return _look(self.path)
        except OSError as error:
            raise FolderInUseError(
                f"{self.argument}={str(self.folder)!r} cannot be taken: its {self.path.name} cannot be read "
                f"({error.strerror}); remove it if no training runs there, or give another {self.argument}"
            ) from error

    def _beat_on(self, ended: threading.Event) -> None:
        while not ended.wait(BEAT_SECONDS) and self._taken_by is None:
            self._beat()

    def _beat(self) -> None:
        """Write a heartbeat; warn at the third failure in a row."""
        try:
            self._write_sign()
        except OSError as error:  # the file system may not answer for a while
            self._failed += 1
            if self._failed == 3:
                logger.warning(
                    "%s cannot be written (%s): other machines take this training for dead after %.0f s without a sign "
                    "of life, and may begin one there", self.path, error.strerror, DEAD_AFTER,
                )  # fmt: skip
        else:
            self._failed = 0

    def _write_sign(self) -> None:
        """Rewrite the lock in place, which works on a full disk; create it again if it is missing."""
        if not self.is_held:  # asked before the mutex, which a fork may have inherited locked
            return
        with self._beating:
            holder = self._holder
            if holder is None:
                return
            try:
                with open(_opened(self.path, os.O_RDWR), "r+b", buffering=0) as file:
                    seen = _parsed(file.read(), 0.0)
                    if seen.token in (holder.token, None):
                        file.seek(0)
                        file.write(_content(holder))
                        file.truncate()
                    elif self._taken_by is None:
                        self._taken_by = seen.name
                        logger.error("%s was taken over by %s", self.folder, seen.name)
            except FileNotFoundError:  # the whole folder may be missing
                self.folder.mkdir(parents=True, exist_ok=True)
                _write_new(self.path, holder)

    def _refusal(self, seen: _Seen) -> str:
        holder, remedy = seen.holder, f"wait for it, end it, or give another {self.argument}"
        if holder is not None and holder.process == os.getpid() and _is_here(holder):
            remedy = f"that is this process; wait for that training, or give another {self.argument}"
        elif holder is not None and _is_here(holder) and is_stopped(holder.process):
            remedy = f"it is stopped: kill -CONT {holder.process} lets it go on, kill -KILL {holder.process} ends it"
        return f"{self.argument}={str(self.folder)!r} is in use: {seen.name} trains there; {remedy}"


def holder_of(folder: Path) -> str | None:
    """Describe the other training that holds a folder now; return None if none does, judged without waiting."""
    try:
        if (seen := _look(folder / NAME)) is None or _is_own(seen.token):
            return None
        lives = None if seen.holder is None else _is_alive(seen.holder)
        if lives is None:
            lives = time.time() - seen.written < DEAD_AFTER
    except OSError:  # a folder that cannot be read
        return None
    return seen.name if lives else None


class _Seen(NamedTuple):
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


class _Watched(NamedTuple):
    """A lock under observation: as first seen, and since when by this process's monotonic clock.

    The file system's clock does not decide, since it may be another machine's.
    """

    first: _Seen
    since: float

    @property
    def patience(self) -> float:
        """Seconds of observation: only a few heartbeats if the file seems old by the present clocks."""
        return min(3 * BEAT_SECONDS, DEAD_AFTER) if time.time() - self.first.written >= DEAD_AFTER else DEAD_AFTER

    def lives(self, seen: _Seen) -> bool | None:
        """Return whether the holder of the lock, as seen now, lives; None while unknown."""
        alive = None if seen.holder is None else _is_alive(seen.holder)
        if alive is not None:
            return alive
        if seen != self.first:
            return True
        return False if time.monotonic() - self.since >= self.patience else None


def _is_own(token: str | None) -> bool:
    return token is not None and _held.get(token) == os.getpid()


def _is_alive(holder: Holder) -> bool | None:
    """Return whether a holder's process lives; None if this machine cannot tell."""
    if not _is_here(holder):
        return None
    if holder.process == os.getpid():  # a process keeps its PID through exec
        return _is_own(holder.token)
    started = start_time(holder.process)
    if started is not None:
        return started == holder.started
    if not psutil.pid_exists(holder.process):
        return False
    try:  # it may be a zombie
        return False if psutil.Process(holder.process).status() in _ENDED else None
    except psutil.Error:
        return None


def _is_here(holder: Holder) -> bool:
    return (holder.host, holder.system) == (socket.gethostname(), system_id())


def _look(path: Path) -> _Seen | None:
    """Read the lock; return None if there is none."""
    try:
        with open(_opened(path, os.O_RDONLY), "rb") as file:  # opening refreshes a network file system's cache
            return _parsed(file.read(), os.fstat(file.fileno()).st_mtime)
    except FileNotFoundError:
        return None


def _opened(path: Path, flags: int) -> int:
    """Open a plain file, without following a link or waiting for a pipe."""
    for name in ("O_NOFOLLOW", "O_NONBLOCK", "O_BINARY"):  # not on every system
        flags |= getattr(os, name, 0)
    descriptor = os.open(path, flags)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is no plain file", str(path))
    return descriptor


def _parsed(content: bytes, written: float) -> _Seen:
    try:
        values = json.loads(content)
        values["membership"] = values.get("membership") and tuple(values["membership"])
        return _Seen(Holder(**{name: values[name] for name in Holder._fields}), content, written)
    except (ValueError, KeyError, TypeError, AttributeError):
        return _Seen(None, content, written)


def _write_new(path: Path, holder: Holder) -> None:
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
        os.write(descriptor, _content(holder))
    except OSError:
        os.unlink(path)
        raise
    finally:
        os.close(descriptor)


def _remove(path: Path, dead: _Seen) -> None:
    """Remove a dead holder's lock; restore a new lock that was created between the look and the rename."""
    if _look(path) != dead:
        return
    aside = path.with_name(f"{path.name}-{uuid.uuid4().hex}")
    try:
        os.rename(path, aside)
    except FileNotFoundError:
        return
    found = _look(aside)
    if found is not None and found.content != dead.content:
        try:
            os.link(aside, path)
        except OSError:  # a new lock exists, or no support for hard links
            if not path.exists():
                os.rename(aside, path)
    aside.unlink(missing_ok=True)


def _remove_leftovers(lock: Path) -> None:
    """Remove the temporary files of killed processes for this lock."""
    for path in lock.parent.glob(f"{lock.name}-*"):
        with contextlib.suppress(OSError):
            if time.time() - path.lstat().st_mtime >= DEAD_AFTER:
                path.unlink()


def _content(holder: Holder) -> bytes:
    """Return the lock's content, of the same length for a holder and membership, so that it is overwritten in place."""
    values: dict[str, Any] = {**holder._asdict(), "beat": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
    return json.dumps(values).encode() + b"\n"
