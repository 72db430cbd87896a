"""`Report`: an HTML report of the run, written when it ends."""

from __future__ import annotations

import importlib.util
import logging
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

from trainer_kit.callback import Callback
from trainer_kit.errors import CutOffError, FolderInUseError
from trainer_kit.report import write_report
from trainer_kit.utils.run_log import NAME

if TYPE_CHECKING:
    from trainer_kit.run import Run
    from trainer_kit.state import TrainState

_logger = logging.getLogger("trainer_kit")


class Report(Callback):
    """Write `report.html` to `args.output_dir` when training ends, normally or by an error.

    It writes the same report as `trainer-kit report`, from the records of `JsonLines`. If that fails, a warning is
    logged. Without matplotlib or records, a line is logged instead.

    Args:
        path: The file; None: `report.html` in `args.output_dir`.
    """

    priority = 200
    is_reporter = True

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        self._path = path
        self._state: TrainState | None = None  # state of the training to report

    def on_train_begin(self, run: Run) -> None:
        self._state = run.state

    def on_exit(self, run: Run) -> None:
        self._write(run)

    def on_exception(self, run: Run, error: BaseException) -> None:
        # A training that did not get the folder, or has lost it, leaves it unchanged.
        if run.state is self._state and not isinstance(error, (CutOffError, FolderInUseError)):
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
        except Exception as error:  # a failed report must not fail the run
            _logger.warning("the report of the run could not be written: %s: %s", type(error).__name__, error)
        else:
            _logger.info("report: %s (%.1f s)", path, time.perf_counter() - begin)
