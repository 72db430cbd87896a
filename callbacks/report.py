"""`Report`: a page about the run, written when it ends."""

from __future__ import annotations

import importlib.util
import logging
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

from trainer_kit.callback import Callback
from trainer_kit.errors import FolderInUseError
from trainer_kit.report import write_report
from trainer_kit.utils.run_log import NAME

if TYPE_CHECKING:
    from trainer_kit.run import Run
    from trainer_kit.state import TrainState

_logger = logging.getLogger("trainer_kit")


class Report(Callback):
    """Writes `report.html` into `args.output_dir` when training ends, in good order or by an error.

    It is what `trainer-kit report` writes, from the records of `JsonLines`. A report that cannot be written is a
    warning; without matplotlib or without records there is none, and one line says so.

    Args:
        path: The file; None: `report.html` in `args.output_dir`.
    """

    priority = 200
    is_reporter = True

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        self._path = path
        self._state: TrainState | None = None  # of the training that it is about

    def on_train_begin(self, run: Run) -> None:
        self._state = run.state

    def on_exit(self, run: Run) -> None:
        self._write(run)

    def on_exception(self, run: Run, error: BaseException) -> None:
        # A start that was refused leaves the folder as it is, and so does one that has lost it.
        if run.state is self._state and not isinstance(error, FolderInUseError):
            self._write(run)

    def _write(self, run: Run) -> None:
        if not run.strategy.is_main:
            return
        log = Path(run.args.output_dir) / NAME
        if not log.exists():
            _logger.info("no report was written: there is no %s; add 'jsonl' to report_to", log)
            return
        if importlib.util.find_spec("matplotlib") is None:
            _logger.info("no report was written: it needs matplotlib (pip install matplotlib)")
            return
        begin = time.perf_counter()
        try:
            path = write_report(log, self._path or log.with_name("report.html"))
        except Exception as error:  # of any kind: the run itself has come to its end
            _logger.warning("the report of the run could not be written: %s: %s", type(error).__name__, error)
        else:
            _logger.info("report: %s (%.1f s)", path, time.perf_counter() - begin)
