"""The learning rate schedule of a run."""

from __future__ import annotations

from typing import Any

import torch
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
        ValueError: If an argument of the schedule is not allowed, the schedule needs evaluations and has none, or a
            parameter group has no learning rate that the schedule could change.
    """
    assert run.optimizer is not None
    scheduler = None if own is None else own_scheduler(own, run.optimizer)
    _check_rates(run.optimizer)
    if own is None and run.args.lr_scheduler_type != "reduce_lr_on_plateau":
        return make_scheduler(run.optimizer, plan.scheduled(run.args), plan.schedule_length, plan.schedule_step)
    if own is None:
        scheduler = make_plateau_scheduler(run.optimizer, run.args)
    if isinstance(scheduler, ReduceLROnPlateau) and (run.args.eval_strategy == "no" or run.eval_dataset is None):
        raise ValueError("ReduceLROnPlateau steps at evaluations; set eval_strategy and give eval_dataset")
    return scheduler


def _check_rates(optimizer: torch.optim.Optimizer) -> None:
    if any(group["lr"] is None for group in optimizer.param_groups):
        raise ValueError(
            f"optimizer={type(optimizer).__name__} has a parameter group with lr=None, which no schedule can change; "
            "give it a learning rate, or lr_scheduler= that sets one, as transformers' AdafactorSchedule does"
        )
