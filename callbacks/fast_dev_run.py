"""`FastDevRun`: a few real steps, an evaluation and a save, before a long training."""

from __future__ import annotations

import copy
import os
import shutil
from typing import TYPE_CHECKING

from trainer_kit.callback import Callback

if TYPE_CHECKING:
    from trainer_kit.run import Run


class FastDevRun(Callback):
    """Take a few real steps, then evaluate, save and stop, to find errors before a long training.

    The run is the one that would train: its loaders, schedule, callbacks and trackers. It writes to the folder
    `fast-dev-run` in `output_dir`, which is removed at the end of a run without errors.

    Args:
        steps: Number of optimizer steps.

    Raises:
        ValueError: If `steps` is below 1.
    """

    priority = 300  # the others have written their files

    def __init__(self, steps: int = 1) -> None:
        if steps < 1:
            raise ValueError(f"FastDevRun({steps}) must take at least 1 step")
        self.steps = steps

    def on_init_end(self, run: Run) -> None:
        run.args = copy.copy(run.args)  # the caller's may be those of the long training too
        run.args.output_dir = os.path.join(run.args.output_dir, "fast-dev-run")

    def on_step_begin(self, run: Run) -> None:
        if run.state.step + 1 >= self.steps:  # served after this step, on several processes too
            requests = run.requests
            requests.evaluate = run.eval_dataset is not None
            requests.log = requests.save = requests.stop = True
            requests.reason = f"FastDevRun: {self.steps} steps are taken"

    def on_exit(self, run: Run) -> None:
        if run.strategy.is_main:
            shutil.rmtree(run.args.output_dir, ignore_errors=True)
