"""`RunLock`: one training at a time in a folder, across processes and machines.

The file `.lock` in the folder names its holder: user, host, process and start of the lock. The holder rewrites it every
few seconds as a heartbeat. A holder on this machine is dead if its process has ended. A holder on another machine is
dead if its heartbeat stops for some time, by the clock of the watching process. The lock of a killed run therefore
blocks no later run. Neither `flock` nor synchronized clocks are needed, only a file system with exclusive creation and
atomic renames of files.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
import uuid
from pathlib import Path
from typing import NamedTuple

from trainer_kit.errors import FolderInUseError
from trainer_kit.utils.lock_file import (
    Holder,
    Seen,
    content_of,
    look,
    opened,
    parsed,
    remove,
    remove_leftovers,
    write_new,
)
from trainer_kit.utils.membership_claim import MembershipClaim, MembershipPlace
from trainer_kit.utils.process_identity import process_state, start_time, system_id, user_name
from trainer_kit.utils.units import format_duration

logger = logging.getLogger("trainer_kit")

NAME = ".lock"
"""The lock's name in the folder of a run."""

BEAT_SECONDS = 10.0
"""Seconds between two heartbeats."""

DEAD_AFTER = 120.0
"""Seconds without a heartbeat after which a holder on another machine counts as dead."""

_LOOK_SECONDS = 0.5
_held: dict[str, int] = {}  # PID by token of this process's locks: a fork inherits the dict, not the locks


class RunLock:
    """Lock of a folder for a training, used only by the run's main process.

    Args:
        folder: The folder, which must exist when the lock is acquired.
        argument: Name of the argument that the user gives the folder by, for errors.
        name: Name of the lock's file.
        membership: Membership of the machines in an elastic run, which claims the folder too; None for any other run.

    Attributes:
        known_dead: Tokens of holders of which processes of this run on their machines know that they have ended.
    """

    def __init__(
        self,
        folder: Path,
        argument: str = "output_dir",
        name: str = NAME,
        membership: MembershipPlace | None = None,
    ) -> None:
        self.folder = folder
        self.argument = argument
        self.path = folder / name
        self.known_dead: set[str] = set()
        self._join(membership)
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
            return (seen := look(self.path)) is not None and seen.token == holder.token
        return False

    def acquire(self) -> None:
        """Acquire the lock; wait if a holder on another machine may be dead.

        Raises:
            FolderInUseError: If another training holds the folder.
            CutOffError: If another membership of this run owns the folder.
            OSError: If the lock cannot be written.
        """
        if self._claim is not None:
            self._claim.take()
        watched: _Watched | None = None
        while not self._is_taken(is_contended=watched is not None):
            if (seen := self._look()) is None:
                time.sleep(_LOOK_SECONDS / 10)
                continue
            if watched is None or watched.first.token != seen.token:
                watched = _Watched(seen, time.monotonic())
            is_dead = self._replaces(seen.holder) or seen.token in self.known_dead
            lives = not is_dead and watched.lives(seen)
            if lives:
                if self._claim is not None:
                    self._claim.keep()
                raise FolderInUseError(self._refusal(seen))
            if lives is None:
                if seen is watched.first:
                    logger.warning(
                        "%s is held by %s; waiting to see whether it continues (after %.0f s without a sign of life it "
                        "counts as dead)", self.folder, seen.name, watched.patience,
                    )  # fmt: skip
                time.sleep(_LOOK_SECONDS)
            else:
                remove(self.path, seen)
        remove_leftovers(self.path, DEAD_AFTER)
        if self._claim is not None:
            self._claim.remove_earlier()
        self._ended = threading.Event()
        threading.Thread(target=self._beat_on, args=(self._ended,), name="run lock", daemon=True).start()

    def renew(self, membership: MembershipPlace | None) -> None:
        """Hold the lock in the name of a later membership of the run; acquire it if the main process was another one.

        Raises:
            FolderInUseError: If another training holds the folder.
            CutOffError: If another membership of this run owns the folder.
            OSError: If the lock cannot be written.
        """
        self._join(membership)
        if self._holder is None:
            self.acquire()
            return
        if self._claim is not None:
            self._claim.take()
        with self._beating:
            self._holder = self._holder._replace(membership=self._membership)
        self.confirm()
        if self._claim is not None:
            self._claim.remove_earlier()

    def _join(self, membership: MembershipPlace | None) -> None:
        self._membership = None if membership is None else (membership.run, membership.number)
        self._claim = None if membership is None else MembershipClaim(self.folder, self.argument, membership)

    def release(self) -> None:
        """Release the lock if this process holds it."""
        holder, self._holder = self._holder, None
        if holder is None or holder.process != os.getpid():  # inherited by a fork
            return
        if self._claim is not None:
            self._claim.keep()
        self._ended.set()
        with self._beating, contextlib.suppress(OSError):
            if (seen := look(self.path)) is not None and seen.token == holder.token:
                os.unlink(self.path)
        _held.pop(holder.token, None)  # a file that stays counts as a dead holder's

    def check(self) -> None:
        """Check without file access that the folder is still held.

        Raises:
            FolderInUseError: If another training took the folder while this process was stopped.
        """
        if self._taken_by is not None:
            silent = f"this process gave no sign of life for {format_duration(DEAD_AFTER)}"
            reason = silent if self._claim is None else "the other machines continue without this one"
            raise FolderInUseError(
                f"{self.folder} was taken over by {self._taken_by}, since {reason}; nothing more is written there"
            )

    def confirm(self) -> None:
        """Check in the file that the folder is still held, before a write there.

        Raises:
            FolderInUseError: If another training took the folder, or a newer membership of this run.
            OSError: If the lock cannot be read or written.
        """
        self._write_sign()
        self._look_for_newer()
        self.check()

    def _look_for_newer(self) -> None:
        """Note a newer membership: its main process creates its file before it takes the lock over."""
        newer = None if self._claim is None else self._claim.newer()
        if newer is not None and self._taken_by is None:
            self._note_loss(f"membership {newer} of this run")

    def _note_loss(self, name: str) -> None:
        self._taken_by = name
        logger.error("%s was taken over by %s", self.folder, name)

    def _is_taken(self, is_contended: bool) -> bool:
        """Try to create the lock; return whether this process holds it.

        If several processes remove a dead lock at the same time, one of them may remove this lock: hence a second look.
        """
        token, process = uuid.uuid4().hex, os.getpid()
        where = socket.gethostname(), system_id(), process, start_time(process)
        holder = Holder(token, user_name(), *where, time.time(), self._membership)
        _held[token] = process  # before other threads can see the lock
        try:
            write_new(self.path, holder)
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

    def _look(self) -> Seen | None:
        try:
            return look(self.path)
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
                with open(opened(self.path, os.O_RDWR), "r+b", buffering=0) as file:
                    seen = parsed(file.read(), 0.0)
                    if seen.token in (holder.token, None):
                        file.seek(0)
                        file.write(content_of(holder))
                        file.truncate()
                    elif self._taken_by is None:
                        self._note_loss(seen.name)
            except FileNotFoundError:  # the whole folder may be missing
                self.folder.mkdir(parents=True, exist_ok=True)
                self._look_for_newer()  # it may be replacing the lock
                if self._taken_by is None:
                    write_new(self.path, holder)

    def _refusal(self, seen: Seen) -> str:
        holder, remedy = seen.holder, f"wait for it, end it, or give another {self.argument}"
        if holder is not None and holder.process == os.getpid() and _is_here(holder):
            remedy = f"that is this process; wait for that training, or give another {self.argument}"
        elif holder is not None and _is_here(holder) and process_state(holder.process) == "stopped":
            remedy = f"it is stopped: kill -CONT {holder.process} lets it continue, kill -KILL {holder.process} ends it"
        return f"{self.argument}={str(self.folder)!r} is in use: {seen.name} trains there; {remedy}"


def holder_of(folder: Path) -> str | None:
    """Describe the other training that holds a folder now; return None if none does, judged without waiting."""
    try:
        if (seen := look(folder / NAME)) is None or _is_own(seen.token):
            return None
        lives = None if seen.holder is None else _is_alive(seen.holder)
        if lives is None:
            lives = time.time() - seen.written < DEAD_AFTER
    except OSError:  # a folder that cannot be read
        return None
    return seen.name if lives else None


def ended_holder(folder: Path) -> str | None:
    """Return the token of a folder's lock whose holder, a process of this machine, has ended; None for any other."""
    try:
        seen = look(folder / NAME)
    except OSError:
        return None
    return seen.token if seen is not None and seen.holder is not None and _is_alive(seen.holder) is False else None


class _Watched(NamedTuple):
    """A lock under observation: as first seen, and since when by this process's monotonic clock.

    The file system's clock does not decide, since it may be another machine's.
    """

    first: Seen
    since: float

    @property
    def patience(self) -> float:
        """Seconds of observation: only a few heartbeats if the file seems old by the present clocks."""
        return min(3 * BEAT_SECONDS, DEAD_AFTER) if time.time() - self.first.written >= DEAD_AFTER else DEAD_AFTER

    def lives(self, seen: Seen) -> bool | None:
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
    return False if process_state(holder.process) == "gone" else None


def _is_here(holder: Holder) -> bool:
    return (holder.host, holder.system) == (socket.gethostname(), system_id())
