"""`TensorBoard`: event files that TensorBoard shows."""

from __future__ import annotations

import contextlib
import json
import logging
import numbers
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer_kit.callback import Callback

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

    from trainer_kit.run import Run

_logger = logging.getLogger("trainer_kit")
_GROUPS = ("eval", "test")
_FIGURES = ("train/loss", "train/train_loss", "train/train_runtime", "train/peak_memory_gib")


class TensorBoard(Callback):
    """Writes every number of the records as a scalar, and the arguments as text and for TensorBoard's table "HPARAMS".

    Tags are `train/loss`, `eval/loss`, `test/loss` and the like, as transformers has them; the step is the optimizer
    step. What the last record says of the whole run is not mixed with the records' figures: it stands under `run/`.
    Numbers that are not finite are written as they are. After a resume the same folder is gone on with, and what had
    been written beyond that step is hidden.

    Args:
        log_dir: Folder of the event files; None: `args.log_dir`.
    """

    priority = 100
    is_reporter = True

    def __init__(self, log_dir: str | os.PathLike[str] | None = None) -> None:
        self._log_dir = log_dir
        self._writer: SummaryWriter | None = None
        self._failed = False
        self._session_end: Any = None  # what tells TensorBoard that the run came to its end

    def on_train_begin(self, run: Run) -> None:
        self._close()
        self._failed = False
        if run.strategy.is_main:
            arguments = json.dumps(run.args.to_dict(), indent=2, default=str)
            self._writer = self._open(run, purge_step=run.state.step + 1)
            self._writer.add_text("arguments", f"```json\n{arguments}\n```", run.state.step)
            self._write_hyperparameters(run)

    def on_rollback(self, run: Run, directory: Path) -> None:
        if self._writer is not None:  # a writer anew, which purges what came after that step
            self._close()
            with self._failures_told():
                self._writer = self._open(run, purge_step=run.state.step + 1)

    def on_log(self, run: Run, record: dict[str, Any]) -> None:
        if "train_runtime" not in record:
            self._write(run, record, "train")
            return
        its_own = {name for name in record if name.startswith("train_") or name in ("step", "epoch")}
        self._write(run, {name: record[name] for name in record if name in its_own}, "train")
        self._write(run, {name: record[name] for name in record if name not in its_own}, "run")

    def on_evaluate(self, run: Run, metrics: dict[str, Any]) -> None:
        self._write(run, metrics, "eval")

    def on_predict(self, run: Run, metrics: dict[str, Any]) -> None:
        self._write(run, metrics, "test")

    def on_save(self, run: Run, directory: Path) -> None:
        with self._failures_told():
            if self._writer is not None:
                self._writer.flush()

    def on_train_end(self, run: Run) -> None:
        if self._writer is not None and self._session_end is not None:
            with self._failures_told():
                _add(self._writer, self._session_end)
        self._close()

    def on_exception(self, run: Run, error: BaseException) -> None:
        self._close()

    def _write_hyperparameters(self, run: Run) -> None:
        """Writes the arguments, and the tags of the figures that runs are compared by.

        `SummaryWriter.add_hparams` would begin a run of its own for them.
        """
        from torch.utils.tensorboard.summary import hparams

        arguments = run.args.to_dict()
        values = {name: value for name, value in arguments.items() if isinstance(value, (bool, int, float, str))}
        tags = [*_FIGURES]
        if run.args.eval_strategy != "no":
            best = run.args.metric_for_best_model or "eval_loss"
            tags += dict.fromkeys(["eval/loss", f"eval/{best.removeprefix('eval_')}"])
        *beginning, self._session_end = hparams(values, dict.fromkeys(tags, 0.0))
        assert self._writer is not None
        for summary in beginning:
            _add(self._writer, summary)

    def _open(self, run: Run, purge_step: int | None = None) -> SummaryWriter:
        from torch.utils.tensorboard import SummaryWriter

        return SummaryWriter(os.fspath(self._log_dir or run.args.log_dir), purge_step=purge_step)

    def _write(self, run: Run, values: dict[str, Any], group: str) -> None:
        if not run.strategy.is_main or self._failed:
            return
        from tensorboard.compat.proto.summary_pb2 import Summary

        scalars = Summary()
        for name, value in values.items():
            if name != "step" and isinstance(value, numbers.Real):
                prefix, _, rest = name.partition("_")
                tag = f"{prefix}/{rest}" if rest and prefix in _GROUPS else f"{group}/{name}"
                scalars.value.add(tag=tag, simple_value=float(value))
        with self._failures_told():
            writer = self._writer or self._open(run)  # an evaluation before or after training has a writer of its own
            # One event for all: `add_scalar` makes one each, which costs as much as several steps of a small model.
            _add(writer, scalars, run.state.step)
            if writer is not self._writer:
                writer.close()

    def _close(self) -> None:
        writer, self._writer = self._writer, None
        with self._failures_told():
            if writer is not None:
                writer.close()

    @contextlib.contextmanager
    def _failures_told(self) -> Iterator[None]:
        """A full disk is no reason to end the run: a warning says once that nothing more is written."""
        try:
            yield
        except OSError as error:
            if not self._failed:
                _logger.warning("TensorBoard's files cannot be written any more: %s; the run goes on", error)
            self._failed, self._writer = True, None


def _add(writer: SummaryWriter, summary: Any, step: int | None = None) -> None:
    assert writer.file_writer is not None
    writer.file_writer.add_summary(summary, step)
