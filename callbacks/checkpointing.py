"""`Checkpointing`: requests checkpoints when they are due."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer_kit.callback import JUDGED, Callback
from trainer_kit.config.event_schedule import EventSchedule

if TYPE_CHECKING:
    from trainer_kit.run import Run


class Checkpointing(Callback):
    """Request checkpoints as `args.save_strategy` says, and one of the last step.

    - "steps": every `args.save_steps` optimizer steps.
    - "epoch": at the end of each epoch.
    - "best": when an evaluation is the best so far. `args.load_best_model_at_end` adds this to the other strategies.
    - "no": never.

    In addition, it requests one when `args.save_minutes` have passed since its last request. The Trainer writes the
    checkpoints, keeps track of the best one, and removes old ones.
    """

    priority = JUDGED

    def __init__(self) -> None:
        self._saved_step = 0
        self._due: float | None = None  # by the monotonic clock, in seconds

    def on_train_begin(self, run: Run) -> None:
        self._saved_step = run.state.step
        self._wind_up(run)
        if run.state.step == 0 and EventSchedule(run.args).saves_before_first_step:
            run.requests.save = True

    def on_regroup(self, run: Run) -> None:
        if self._due is None:  # the last main process may be lost
            self._wind_up(run)

    def on_step_end(self, run: Run) -> None:
        is_time = self._due is not None and time.monotonic() >= self._due
        if is_time or EventSchedule(run.args).is_due_after_step("save", run.state.step, run.total_steps):
            run.requests.save = True
            self._wind_up(run)

    def on_epoch_end(self, run: Run) -> None:
        if EventSchedule(run.args).is_due_after_epoch("save"):
            run.requests.save = True

    def on_evaluate(self, run: Run, metrics: dict[str, Any]) -> None:
        if EventSchedule(run.args).saves_best and run.state.best_step == run.state.step:
            run.requests.save = True

    def on_save(self, run: Run, directory: Path) -> None:
        self._saved_step = int(directory.name.rpartition("-")[2])

    def on_train_end(self, run: Run, metrics: dict[str, Any] | None) -> None:
        if EventSchedule(run.args).is_due_at_end("save") and self._saved_step != run.state.step:
            run.requests.save = True

    def _wind_up(self, run: Run) -> None:
        if run.args.save_minutes is not None and run.strategy.is_main:
            self._due = time.monotonic() + 60 * run.args.save_minutes
