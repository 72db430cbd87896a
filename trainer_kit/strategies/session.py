"""`Session`: preemption, restarts and folders of a run. This base is for one process."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path

from trainer_kit.config import environment
from trainer_kit.strategies.collectives import Collectives

logger = logging.getLogger("trainer_kit")


class Session:
    """What the processes of a run, its launcher and its machines report to one another during a training.

    Args:
        collectives: Those of the strategy.
    """

    def __init__(self, collectives: Collectives) -> None:
        self.collectives = collectives
        self._is_preempted = False

    @property
    def restarts(self) -> int:
        """How often a launcher has started this run again after a failure."""
        return environment.place().restarts

    @property
    def is_preempted(self) -> bool:
        """Whether a process of the run was asked to exit; others see it within seconds, at no cost."""
        return self._is_preempted

    def announce_preemption(self) -> None:
        """Report to all processes that this one was asked to exit (a signal), so that they break off long work."""
        self._is_preempted = True

    def end_training(self, error: BaseException | None) -> None:
        """End a training; `error` is what ended it, None where it ended in good order."""
        self._is_preempted = False  # in a notebook the process lives on, and may evaluate

    def set_abort_handler(self, handler: Callable[[], object] | None) -> None:
        """Have `handler` called, in a thread, if this process must end while it waits for one that is lost."""

    def report_saved_step(self, step: int) -> None:
        """Report to this machine's launcher, which may restart the run, that it could resume at this step."""
        path = environment.progress_file()
        if path is not None and self.collectives.is_local_main:
            new = Path(f"{path}.new")
            try:
                new.write_text(f"{step}\n")
                os.replace(new, path)
            except OSError as error:
                logger.warning("the launcher could not be told of the checkpoint of step %d: %s", step, error)

    def fetch_checkpoint(self, directory: Path) -> Path:
        """Return a folder of the main process, or a copy of it that this process can read. Collective."""
        return directory

    def release_checkpoint_copies(self) -> None:
        """Remove what `fetch_checkpoint` copied, once all processes have read it. Collective."""

    def log_output_visibility(self, directory: Path) -> None:
        """Log which machines see the folder that the main process writes to, if there are several. Collective."""
