"""Lock of the folder in which a hand-written loop numbers and prunes its checkpoints."""

from __future__ import annotations

import weakref
from pathlib import Path

from trainer_kit.checkpoint.format.disk import make_run_folder
from trainer_kit.config import environment
from trainer_kit.utils.run_lock import RunLock

NAME = ".checkpoints.lock"
"""Name of the lock's file: another one than a Trainer's, and outside of the folder whose entries are checkpoints."""

_locks: dict[Path, ProjectLock] = {}
"""Latest lock of each project in this process."""


class ProjectLock(RunLock):
    """Lock that all Accelerators of a process share; the last one to leave releases it.

    It also ends when the folder is removed.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, "project_dir", NAME, environment.membership())
        self._users: set[int] = set()

    def add_user(self, user: object) -> None:
        """Keep the lock until `user` leaves or is freed."""
        if id(user) not in self._users:
            self._users.add(id(user))
            weakref.finalize(user, self._leave, id(user))

    def remove_user(self, user: object) -> None:
        """Release the lock if there is no other user."""
        self._leave(id(user))

    def _leave(self, user: int) -> None:
        self._users.discard(user)
        if not self._users:
            self.release()

    def _beat(self) -> None:
        try:
            is_there = self.folder.exists()
        except OSError:
            is_there = True  # the file system may not answer for a while
        if is_there:
            super()._beat()
        else:
            self.release()


def lock_project(folder: Path, user: object) -> ProjectLock:
    """Return this process's lock of a project's folder, which is created if it is missing.

    A rank that the notebook launcher forked from the holder shares the holder's lock.

    Args:
        folder: The folder.
        user: The object that saves there, see `ProjectLock.add_user`.

    Raises:
        FolderInUseError: If another process holds the folder.
        OSError: If the folder cannot be written.
    """
    folder = folder.resolve()
    lock = _locks.get(folder)
    if lock is not None and lock.is_held and not folder.exists():
        lock.release()
    if lock is None or not (lock.is_held or (environment.launcher() and lock.is_inherited)):
        make_run_folder(folder)
        lock = ProjectLock(folder)
        lock.acquire()
        _locks[folder] = lock
    lock.add_user(user)
    return lock
