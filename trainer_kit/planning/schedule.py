"""Learning rate of every step, from the real scheduler on an optimizer without effect."""

from __future__ import annotations

import copy
import dataclasses
import functools
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch.optim.lr_scheduler import ReduceLROnPlateau

from trainer_kit.checkpoint.compatibility import fitting_optimizer_state, load_scheduler
from trainer_kit.data.run_length import RunLength
from trainer_kit.loop.lr_schedule import make_run_scheduler
from trainer_kit.optim import Schedule
from trainer_kit.planning import sections
from trainer_kit.planning.dry_strategy import schedule_only
from trainer_kit.run import Run
from trainer_kit.utils.optimizer_state import described_groups

_POINTS = 1000
"""Largest number of points in a curve."""

_LENGTHS = ("total_steps", "T_max", "total_iters", "num_training_steps")
"""Names of schedulers' attributes for their length in steps."""


class Rates:
    """Learning rates of a run.

    Args:
        run: Run at its starting point; its optimizer stays unchanged.
        given: The user's scheduler, or a function that creates one; None for the one that the arguments select.
        plan: The run's steps.
        directory: Checkpoint that the run resumes from; None for a run from step 0.

    Attributes:
        scheduler: Copy of the run's scheduler, or the scheduler that the run would create.
        rates: Rate of each remaining step, in the first parameter group.
        groups: First rate of each parameter group.
        error: Error that ends the schedule early; None if there is none.

    Raises:
        TypeError: If `given` is no scheduler.
        ValueError: If an argument of the schedule is invalid, or the checkpoint belongs to another schedule.
    """

    def __init__(self, run: Run, given: Any, plan: RunLength, directory: Path | None) -> None:
        assert run.optimizer is not None
        self.run = run
        self.first = run.state.step
        self.error: str | None = None
        self.optimizer = schedule_only(run.optimizer)
        if hasattr(given, "state_dict"):
            given = copy.deepcopy(given, {id(getattr(given, "optimizer", run.optimizer)): self.optimizer})
        dry_run = dataclasses.replace(run, optimizer=self.optimizer)
        self.scheduler = dry_run.lr_scheduler = run.lr_scheduler = make_run_scheduler(dry_run, plan, given)
        if directory is not None:
            saved = described_groups(fitting_optimizer_state(run, directory))
            for group, other in zip(self.optimizer.param_groups, saved, strict=True):
                group.update(other["rates"])
            load_scheduler(dry_run, directory)
        self.groups = [float(group["lr"]) for group in self.optimizer.param_groups]
        self.rates = list(self._stepped(plan, plan.last_step - self.first))

    def _stepped(self, plan: RunLength, steps: int) -> Iterator[float]:
        scheduler, group = self.scheduler, self.optimizer.param_groups[0]
        if isinstance(scheduler, Schedule):
            peak, factor = scheduler.base_lrs[0], scheduler.lr_lambdas[0]
            yield from (float(peak * factor(step)) for step in range(plan.schedule_step, plan.schedule_step + steps))
            return
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about scheduler steps without optimizer steps
            for step in range(1, steps + 1):
                yield float(group["lr"])
                if isinstance(scheduler, ReduceLROnPlateau):
                    continue
                try:
                    scheduler.step()
                except Exception as error:  # the user's own code
                    self.error = (
                        f"{type(scheduler).__name__} raises after step {self.first + step}: "
                        f"{type(error).__name__}: {error}"
                    )
                    return

    def facts(self) -> sections.ScheduleSection:
        """Return the plan's section on the learning rate."""
        count = len(self.rates)
        places = range(count) if count <= _POINTS else [round(i * (count - 1) / (_POINTS - 1)) for i in range(_POINTS)]
        points = tuple((self.first + place + 1, self.rates[place]) for place in places)
        return sections.ScheduleSection(
            optimizer=type(self.run.optimizer).__name__,
            name=self._name(),
            points=points,
            lowest=min(self.rates, default=self.groups[0]),
            highest=max(self.rates, default=self.groups[0]),
            note=self._note(),
        )

    def _name(self) -> str:
        args = self.run.args
        return args.lr_scheduler_type if isinstance(self.scheduler, Schedule) else type(self.scheduler).__name__

    def _note(self) -> str:
        scheduler = self.scheduler
        if isinstance(scheduler, ReduceLROnPlateau):
            metric = self.run.args.metric_for_best_model or "eval_loss"
            return (
                f"depends on {metric}: times {scheduler.factor:g} after more than {scheduler.patience} evaluations "
                "without an improvement"
            )
        if len(set(self.groups)) > 1:
            return (
                f"of the first of {len(self.groups)} groups, which begin at {', '.join(f'{r:g}' for r in self.groups)}"
            )
        return ""

    def warnings(self) -> Iterator[str]:
        """Yield warnings about the rates."""
        rates, steps = self.rates, self.run.total_steps
        if self.error is not None or not rates:
            return
        if max(rates) == 0:
            yield "the learning rate is 0 in every step: nothing is learned"
            return
        zeros = next(count for count, rate in enumerate(reversed(rates)) if rate)
        if zeros > 1:
            yield f"the learning rate is 0 in the last {zeros:,} of {len(rates):,} steps: they change nothing"
        if isinstance(self.scheduler, Schedule):
            yield from self._of_warmup()
            return
        for owner in [self.scheduler, *getattr(self.scheduler, "_schedulers", ())]:
            for name, length in _lengths(owner):
                if length > steps:
                    yield (
                        f"the schedule is longer than training: {type(owner).__name__} has {name}={length:,}, training "
                        f"ends after {steps:,} steps at a learning rate of {rates[-1]:.3g}"
                    )
                    return

    def _of_warmup(self) -> Iterator[str]:
        args, end = self.run.args, self.run.total_steps
        warmup = int(args.warmup_steps)
        if warmup >= end > 0 and args.lr_scheduler_type not in ("constant", "one_cycle"):
            yield (
                f"warmup_steps={warmup:,} is no shorter than training, which takes {end:,} steps: the learning rate "
                f"never reaches {args.learning_rate:g}"
            )


def _lengths(scheduler: Any) -> Iterator[tuple[str, int]]:
    """Yield the names and values of a scheduler's lengths in steps, as far as it exposes them."""
    exposed = dict(vars(scheduler))
    for factor in getattr(scheduler, "lr_lambdas", ()):  # transformers' schedules are functools.partial objects
        exposed |= factor.keywords if isinstance(factor, functools.partial) else {}
    milestones = exposed.get("_milestones") or exposed.get("milestones") or ()
    yield from ((name, exposed[name]) for name in _LENGTHS if isinstance(exposed.get(name), int))
    if milestones:
        yield "milestones up to", max(milestones)
