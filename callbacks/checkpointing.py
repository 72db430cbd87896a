"""`Checkpointing`: asks for checkpoints when they are due."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer_kit.callback import Callback

if TYPE_CHECKING:
    from trainer_kit.run import Run


class Checkpointing(Callback):
    """Asks for a checkpoint as `args.save_strategy` says, and for one of the last step.

    With "steps" every `args.save_steps` optimizer steps, with "epoch" at the end of each epoch, with "best" (and
    with `args.load_best_model_at_end` in any case) whenever an evaluation is the best so far. With "no" it asks for
    none. The Trainer writes checkpoints, keeps track of the best one, and removes old ones.
    """

    def __init__(self) -> None:
        self._saved_step = 0
        self._every = 0

    def on_train_begin(self, run: Run) -> None:
        self._saved_step = run.state.step
        self._every = int(run.args.save_steps) if run.args.save_strategy == "steps" else 0

    def on_step_end(self, run: Run) -> None:
        if self._every and run.state.step % self._every == 0:
            run.requests.save = True

    def on_epoch_end(self, run: Run) -> None:
        if run.args.save_strategy == "epoch":
            run.requests.save = True

    def on_evaluate(self, run: Run, metrics: dict[str, Any]) -> None:
        keeps_best = run.args.save_strategy == "best" or run.args.load_best_model_at_end
        if keeps_best and run.args.save_strategy != "no" and run.state.best_step == run.state.step:
            run.requests.save = True

    def on_save(self, run: Run, directory: Path) -> None:
        self._saved_step = run.state.step

    def on_train_end(self, run: Run) -> None:
        if run.args.save_strategy != "no" and self._saved_step != run.state.step:
            run.requests.save = True
