"""`TensorBoard`: event files for TensorBoard."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer_kit.callback import Callback
from trainer_kit.utils.event_file import EventFile
from trainer_kit.utils.write_errors import WriteErrors

from .scalar_tags import final_tags, scalar_tags

if TYPE_CHECKING:
    from trainer_kit.run import Run

_logger = logging.getLogger("trainer_kit")
_FIGURES = ("train/loss", "train/train_loss", "train/train_runtime", "train/peak_memory_gib")


class TensorBoard(Callback):
    """Write every number of the records as a scalar, and the arguments as text and for TensorBoard's table "HPARAMS".

    Tags are `train/loss`, `eval/loss`, `test/loss` and so on, as in transformers. The step is the optimizer step.
    Callbacks' metrics of the whole run are under `run/`, separate from those of records. Non-finite numbers are written
    unchanged. Each record is written immediately. If that fails (a full or read-only disk), a warning is logged, and
    each later record is tried again. A resumed run writes to the same folder, and events after its step are hidden.

    Args:
        log_dir: Folder of the event files; None: `args.log_dir`.
    """

    priority = 100
    is_reporter = True

    def __init__(self, log_dir: str | os.PathLike[str] | None = None) -> None:
        self._log_dir = log_dir
        self._file: EventFile | None = None
        self._purge_step: int | None = None  # for the next file
        self._is_training = self._has_begun = False
        self._errors = WriteErrors("TensorBoard's files cannot be written", self._drop)
        self._session_end: Any = None  # the summary that marks the end of the run

    def on_train_begin(self, run: Run) -> None:
        self._close()
        self._is_training, self._has_begun, self._errors.is_failing = True, False, False
        self._purge_step = run.state.step + 1
        self._write(run, {})

    def on_rollback(self, run: Run, directory: Path) -> None:
        self._close()  # the next file hides what came after that step
        self._purge_step = run.state.step + 1
        self._write(run, {})

    def on_regroup(self, run: Run) -> None:
        if self._file is None:  # the last main process may be lost, which wrote up to this step
            self._purge_step = run.state.step + 1
            self._write(run, {})

    def on_log(self, run: Run, record: dict[str, Any]) -> None:
        self._write(run, scalar_tags(record, "train"))

    def on_evaluate(self, run: Run, metrics: dict[str, Any]) -> None:
        self._write(run, scalar_tags(metrics, "eval"))

    def on_predict(self, run: Run, metrics: dict[str, Any]) -> None:
        self._write(run, scalar_tags(metrics, "test"))

    def on_save(self, run: Run, directory: Path) -> None:
        if self._file is not None:
            with self._errors.warned():
                self._file.flush()

    def on_train_end(self, run: Run, metrics: dict[str, Any] | None) -> None:
        if metrics is not None:
            self._write(run, final_tags(metrics))
        if self._file is not None and self._session_end is not None:
            with self._errors.warned():
                self._file.add(self._session_end)
        self._is_training = False
        self._close()

    def on_exception(self, run: Run, error: BaseException) -> None:
        self._is_training = False
        self._close()

    def _write_beginning(self, run: Run, file: EventFile) -> None:
        """Write the arguments as text and, with the tags to compare runs by, for the table "HPARAMS".

        `SummaryWriter.add_hparams` would start a separate run for them.
        """
        from torch.utils.tensorboard.summary import hparams, text

        arguments = run.args.to_dict()
        file.add(text("arguments", f"```json\n{json.dumps(arguments, indent=2, default=str)}\n```"), run.state.step)
        values = {
            name: _encodable(value) if isinstance(value, str) else value
            for name, value in arguments.items()
            if isinstance(value, (bool, int, float, str))
        }
        tags = [*_FIGURES]
        if run.args.eval_strategy != "no":
            best = run.args.metric_for_best_model or "eval_loss"
            tags += dict.fromkeys(["eval/loss", f"eval/{best.removeprefix('eval_')}"])
        *beginning, self._session_end = hparams(values, dict.fromkeys(tags, 0.0))
        for summary in beginning:
            file.add(summary)

    def _opened(self, run: Run) -> EventFile:
        """Return the file of this training; open a new one after a failure."""
        if self._file is None:
            file = self._file = EventFile(os.fspath(self._log_dir or run.args.log_dir), self._purge_step)
            if self._is_training and not self._has_begun:
                self._write_beginning(run, file)
            self._purge_step, self._has_begun = None, True
        return self._file

    def _write(self, run: Run, tags: dict[str, float]) -> None:
        if not run.strategy.is_main:
            return
        from tensorboard.compat.proto.summary_pb2 import Summary

        scalars = Summary()
        for tag, value in tags.items():
            scalars.value.add(tag=tag, simple_value=value)
        with self._errors.warned():
            file = self._opened(run)
            if tags:
                file.add(scalars, run.state.step)  # one event for all
            if self._errors.is_failing:
                _logger.info("TensorBoard's files are written again from step %d on", run.state.step)
        if not self._is_training:  # an evaluation before or after training has a file of its own
            self._close()

    def _close(self) -> None:
        if self._file is not None:
            with self._errors.warned():
                self._drop()

    def _drop(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()


def _encodable(text: str) -> str:
    """Make text valid for a protocol buffer: undecodable bytes of a path become escapes."""
    return text.encode(errors="backslashreplace").decode()
