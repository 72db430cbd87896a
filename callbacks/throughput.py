"""`Throughput`: how fast the run goes, and how much of its time it waits for data."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from trainer_kit.callback import Callback

if TYPE_CHECKING:
    from trainer_kit.run import Run


class _Mark(NamedTuple):
    """Where the run stood when the last record was made; `paused` are seconds that were no training."""

    time: float
    paused: float
    data_seconds: float
    step: int
    samples: int
    tokens: int


class Throughput(Callback):
    """Adds to every record the rates since the record before it, over all processes.

    `samples_per_second`, `steps_per_second`, `tokens_per_second` (where batches have tokens; padding not counted) and
    `data_wait`: the share of the time, 0 to 1, that the loop waited for the next batch.
    Time spent in evaluations and checkpoints is left out.
    """

    priority = 110

    def __init__(self) -> None:
        self._mark: _Mark | None = None
        self._paused = 0.0  # seconds of evaluations since training began
        self._busy_until = 0.0  # when the last step, record or evaluation ended
        self._evaluation_began = 0.0

    def on_train_begin(self, run: Run) -> None:
        self._paused = 0.0
        self._mark = self._measure(run)

    def on_step_end(self, run: Run) -> None:
        self._busy_until = time.perf_counter()

    def on_evaluate_begin(self, run: Run) -> None:
        self._evaluation_began = time.perf_counter()

    def on_evaluate_end(self, run: Run) -> None:
        self._pause(since=self._evaluation_began)

    def on_evaluate(self, run: Run, metrics: dict[str, Any]) -> None:
        self._pause(since=self._busy_until)

    def on_rollback(self, run: Run, directory: Path) -> None:
        self._mark = self._measure(run)

    def metrics(self, run: Run) -> dict[str, Any]:
        before, now = self._mark, self._measure(run)
        if before is None or now.step == before.step:
            return {}
        self._mark, self._busy_until = now, now.time
        seconds = now.time - before.time - (now.paused - before.paused)
        if seconds <= 0:
            return {}
        rates = {
            "samples_per_second": (now.samples - before.samples) / seconds,
            "steps_per_second": (now.step - before.step) / seconds,
            "data_wait": min(1.0, (now.data_seconds - before.data_seconds) / seconds),
        }
        if now.tokens > before.tokens:
            rates["tokens_per_second"] = (now.tokens - before.tokens) / seconds
        return rates

    def _pause(self, since: float) -> None:
        self._busy_until = time.perf_counter()
        self._paused += self._busy_until - since

    def _measure(self, run: Run) -> _Mark:
        state = run.state
        seconds = run.ledger.seconds()
        paused = self._paused + seconds.get("saving", 0.0)
        return _Mark(time.perf_counter(), paused, seconds.get("data", 0.0), state.step, state.samples, state.tokens)
