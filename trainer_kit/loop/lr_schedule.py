"""The learning rate schedule of a run."""

from __future__ import annotations

from typing import Any

from torch.optim.lr_scheduler import ReduceLROnPlateau

from trainer_kit.data.run_length import RunLength
from trainer_kit.optim import make_plateau_scheduler, make_scheduler, own_scheduler
from trainer_kit.run import Run


def make_run_scheduler(run: Run, plan: RunLength, own: Any = None) -> Any:
    """Return the scheduler of a run's optimizer, at its step under the present layout.

    Args:
        run: The run, with its optimizer.
        plan: The run's length.
        own: The user's own scheduler, or a function that makes it; None: as the arguments say.

    Raises:
        TypeError: If `own` gives no scheduler.
        ValueError: If an argument of the schedule is not allowed, or the schedule needs evaluations and has none.
    """
    assert run.optimizer is not None
    by_plateau = own is None and run.args.lr_scheduler_type == "reduce_lr_on_plateau"
    if own is None and not by_plateau:
        return make_scheduler(run.optimizer, plan.scheduled(run.args), plan.schedule_length, plan.schedule_step)
    scheduler = make_plateau_scheduler(run.optimizer, run.args) if by_plateau else own_scheduler(own, run.optimizer)
    if isinstance(scheduler, ReduceLROnPlateau) and (run.args.eval_strategy == "no" or run.eval_dataset is None):
        raise ValueError("ReduceLROnPlateau steps at evaluations; set eval_strategy and give eval_dataset")
    return scheduler
