"""`Console`: a plain line every few seconds, for runs whose output goes to a file."""

from __future__ import annotations

import math
import sys
import time
from typing import TYPE_CHECKING, Any

from trainer_kit.callback import Callback
from trainer_kit.utils.units import format_duration

from .formatting import HIDDEN, metrics_line, pairs, summary_line

if TYPE_CHECKING:
    from trainer_kit.run import Run


class Console(Callback):
    """Write one line to stderr every few seconds, however often the run logs.

    The first and the last record always get a line, and so do the metrics of every evaluation and of the whole run. If
    records are further apart than twice `every`, a line without a loss shows that the run is alive.

    Args:
        every: Seconds between two lines of records; 0 shows every record and no such lines in between.

    Raises:
        ValueError: If `every` is negative.
    """

    priority = 100
    is_reporter = True

    def __init__(self, every: float = 5.0) -> None:
        if not every >= 0:
            raise ValueError(f"Console(every={every!r}) must be a number of seconds, 0 or more")
        self.every = every
        self._training = False
        self._began = 0.0
        self._first_step = 0
        self._record_due = self._sign_due = math.inf
        self._waiting: dict[str, Any] | None = None  # the newest record, while it is too early for a line

    def on_train_begin(self, run: Run) -> None:
        self._training, self._waiting = True, None
        self._first_step = run.state.step
        self._began = self._record_due = time.monotonic()
        self._write(run, f"training begins on {run.strategy.device}")

    def on_step_end(self, run: Run) -> None:
        if time.monotonic() >= self._sign_due:
            self._write(run, f"epoch {run.state.epochs:.4g}{self._time_left(run)}")

    def on_log(self, run: Run, record: dict[str, Any]) -> None:
        self._waiting = record
        if time.monotonic() >= self._record_due:
            self._write_waiting(run)
            self._record_due = time.monotonic() + self.every

    def on_evaluate(self, run: Run, metrics: dict[str, Any]) -> None:
        self._write_waiting(run)
        if metrics:
            self._write(run, metrics_line(metrics))

    def on_predict(self, run: Run, metrics: dict[str, Any]) -> None:
        self.on_evaluate(run, metrics)

    def on_train_end(self, run: Run, metrics: dict[str, Any] | None) -> None:
        if metrics is not None:
            self._write_waiting(run)
            self._write(run, summary_line(metrics))
        self._training, self._sign_due = False, math.inf
        self._write_waiting(run)

    def on_exception(self, run: Run, error: BaseException) -> None:
        if self._training:
            self.on_train_end(run, None)
            passed = format_duration(time.monotonic() - self._began)
            self._write(run, f"training ends by {type(error).__name__} after {passed}")

    def _write_waiting(self, run: Run) -> None:
        if self._waiting is not None:
            record, self._waiting = self._waiting, None
            self._write(run, f"{pairs(record, HIDDEN)}{self._time_left(run)}", record.get("step"))

    def _write(self, run: Run, text: str, step: int | None = None) -> None:
        """Write a line in one call, so that lines of several processes do not mix."""
        if self._training and self.every:
            self._sign_due = time.monotonic() + 2 * self.every
        if run.strategy.is_main and sys.stderr is not None:
            step = run.state.step if step is None else step
            total = f"/{run.total_steps}" if run.total_steps else ""
            sys.stderr.write(f"step {step}{total}  {text}\n")
            sys.stderr.flush()

    def _time_left(self, run: Run) -> str:
        steps = run.state.step - self._first_step
        if not self._training or steps == 0 or run.state.step >= run.total_steps:
            return ""
        per_step = (time.monotonic() - self._began) / steps
        return f"  {format_duration(per_step * (run.total_steps - run.state.step))} left"
