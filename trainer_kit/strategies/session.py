"""`Session`: preemption, restarts and folders of a run. The base class is for one process."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path

from trainer_kit.config import environment
from trainer_kit.strategies.collectives import Collectives

logger = logging.getLogger("trainer_kit")


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
                logger.warning("the launcher could not be told of the checkpoint of step %d: %s", step, error)

    def fetch_checkpoint(self, directory: Path) -> Path:
        """Return the main process's folder, or a copy of it if this process cannot read it. Collective."""
        return directory

    def release_checkpoint_copies(self) -> None:
        """Remove the copies of `fetch_checkpoint`, once all processes have read them. Collective."""

    def log_output_visibility(self, directory: Path) -> None:
        """Log which machines can read the main process's output folder, if there are several. Collective."""
