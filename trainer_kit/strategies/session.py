"""`Session`: preemption, restarts and folders of a run. The base class is for one process."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from trainer_kit.config import environment
from trainer_kit.errors import CutOffError
from trainer_kit.strategies.collectives import Collectives
from trainer_kit.utils.membership_claim import report_claim

if TYPE_CHECKING:
    from trainer_kit.strategies.peer_channel import PeerChannel

logger = logging.getLogger("trainer_kit")

REPLACE = "replace"
"""File in the folder of the launcher's progress file by which a rank asks for a replacement of its machine."""


class Session:
    """Communication between the processes of a run, its launcher and its machines during a training.

    Args:
        collectives: The strategy's collectives.
    """

    def __init__(self, collectives: Collectives) -> None:
        self.collectives = collectives
        self._is_preempted = False

    @property
    def restarts(self) -> int:
        """Number of times that a launcher has restarted this run after a failure."""
        return environment.place().restarts

    @property
    def is_preempted(self) -> bool:
        """Whether any process of the run was asked to exit; other processes see it within seconds."""
        return self._is_preempted

    def announce_preemption(self) -> None:
        """Report to all processes that this one was asked to exit by a signal, so that they interrupt long work."""
        self._is_preempted = True

    def watch(self) -> Callable[[], None]:
        """Return a check for lost processes, see `ProcessGroup.watch`; without others, it does nothing."""
        return lambda: None

    def end_training(self, error: BaseException | None) -> None:
        """End a training; `error` is the error that ended it, None if it ended normally."""
        self._is_preempted = False  # in a notebook the process may still evaluate

    def set_abort_handler(self, handler: Callable[[], object] | None) -> None:
        """Set a handler that a thread calls before it ends this process because another one is lost; None: none."""

    def report_saved_step(self, step: int) -> None:
        """Report the step of the newest checkpoint to this machine's launcher, which may restart the run."""
        path = environment.progress_file()
        if path is not None and self.collectives.is_local_main:
            new = Path(f"{path}.new")
            try:
                new.write_text(f"{step}\n")
                os.replace(new, path)
            except OSError as error:
                logger.warning("could not report the checkpoint of step %d to the launcher: %s", step, error)

    def ask_for_replacement(self) -> None:
        """Ask this machine's launcher to let a waiting machine take its place; the launcher decides."""
        path = environment.progress_file()
        if path is not None:
            with contextlib.suppress(OSError):  # the next comparison asks again
                Path(path).with_name(REPLACE).touch()

    @contextlib.contextmanager
    def reporting_claim(self) -> Iterator[None]:
        """Report to this machine's launcher whether the main process can claim the output folder in the block."""
        try:
            yield
        except CutOffError:
            self._report_claim(is_held=False)
            raise
        self._report_claim(is_held=True)

    def _report_claim(self, is_held: bool) -> None:
        membership, path = environment.membership(), environment.progress_file()
        if membership is not None and path is not None and self.collectives.is_local_main:
            try:
                report_claim(Path(path), membership.number, is_held)
            except OSError as error:
                logger.warning("could not report to the launcher who holds the output folder: %s", error)

    def fetch_checkpoint(self, directory: Path) -> Path:
        """Return the main process's folder, or a copy of it if this process cannot read it. Collective."""
        return directory

    def release_checkpoint_copies(self) -> None:
        """Remove the copies of `fetch_checkpoint`, once all processes have read them. Collective."""

    def find_writers(self, directory: Path) -> list[int]:
        """Return the ranks that can write to the main process's output folder, the main one first. Collective.

        They have the same model and optimizer state, of which each writes a share. If there are several machines, this
        logs which of them see the folder.
        """
        return [0]

    def find_readers(self, directory: Path) -> list[int]:
        """Return the ranks that can read a folder of the main process, the main one first. Collective."""
        return [0]

    def open_peer_channel(self) -> PeerChannel | None:
        """Return a channel on which a thread reaches the other processes; None without others. Collective.

        Raises:
            ValueError: If processes cannot copy their state to others.
        """
        return None

    def bring_to_main(self, source: Path, holder: int, target: Path, size: int) -> None:
        """Copy a file from a machine that cannot write to the main process's folder. Collective.

        Args:
            source: The file, as its holder names it.
            holder: Rank of the process that reads it.
            target: The file that the main process writes.
            size: Size of the file in bytes.

        Raises:
            OSError: If the file cannot be read or written.
        """
        raise NotImplementedError("all processes see the folder")

    def send_to_main(self, key: str, text: str) -> None:
        """Send a short message to the main process. Not collective; any thread may call it.

        The message is lost if the main process is.

        Args:
            key: Name of the message, used once in a run.
            text: The message.
        """
        raise NotImplementedError("a single process has no other to send to")

    def receive(self, key: str, rank: int) -> str | None:
        """Wait on the main process for a message of another process. Not collective; any thread may call it.

        Args:
            key: Name of the message.
            rank: Rank of the process that sends it.

        Returns:
            The message; None if that process has left the run, has failed, has ended or does not answer.
        """
        raise NotImplementedError("a single process has no other to receive from")
