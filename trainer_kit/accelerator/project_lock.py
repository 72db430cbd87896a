"""Lock of the folder in which a hand-written loop numbers and prunes its checkpoints."""

from __future__ import annotations

from pathlib import Path

from trainer_kit.checkpoint.format.disk import make_run_folder
from trainer_kit.utils.run_lock import RunLock

_locks: dict[Path, ProjectLock] = {}
"""Latest lock of each folder in this process."""


class ProjectLock(RunLock):
    """Lock that all Accelerators of a process share; it ends when the folder is removed."""

    def _beat(self) -> None:
        if self.folder.exists():
            super()._beat()
        else:
            self.release()


def lock_project(folder: Path) -> ProjectLock:
    """Return this process's lock of a folder, which is created if it is missing. A forked process shares it.

    Raises:
        FolderInUseError: If another process holds the folder.
        OSError: If the folder cannot be written.
    """
    folder = folder.resolve()
    lock = _locks.get(folder)
    if lock is not None and not folder.exists():
        lock.release()
    if lock is None or not lock.is_held:
        make_run_folder(folder)
        lock = ProjectLock(folder)
        lock.acquire()
        _locks[folder] = lock
    return lock
