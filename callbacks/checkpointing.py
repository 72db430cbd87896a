"""`Checkpointing`: requests checkpoints when they are due."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer_kit.callback import JUDGED, Callback

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
        self._due = float("inf")  # by the monotonic clock, in seconds

    def on_train_begin(self, run: Run) -> None:
        self._saved_step = run.state.step
        self._wind_up(run)
        if run.args.nonfinite == "rollback" and run.state.step == 0:
            run.requests.save = True  # a rollback needs a checkpoint before the first one is due

    def on_step_end(self, run: Run) -> None:
        if run.args.saves_after(run.state.step) or time.monotonic() >= self._due:
            run.requests.save = True
            self._wind_up(run)

    def on_epoch_end(self, run: Run) -> None:
        if run.args.save_strategy == "epoch":
            run.requests.save = True

    def on_evaluate(self, run: Run, metrics: dict[str, Any]) -> None:
        keeps_best = run.args.save_strategy == "best" or run.args.load_best_model_at_end
        if keeps_best and run.args.save_strategy != "no" and run.state.best_step == run.state.step:
            run.requests.save = True

    def on_save(self, run: Run, directory: Path) -> None:
        self._saved_step = int(directory.name.rpartition("-")[2])

    def on_train_end(self, run: Run, metrics: dict[str, Any] | None) -> None:
        if run.args.save_strategy != "no" and self._saved_step != run.state.step:
            run.requests.save = True

    def _wind_up(self, run: Run) -> None:
        if run.args.save_minutes is not None and run.strategy.is_main:
            self._due = time.monotonic() + 60 * run.args.save_minutes
