"""`EventSchedule`: the steps after which a run logs, evaluates and saves."""

from __future__ import annotations

import math
from collections.abc import Collection
from operator import attrgetter
from typing import Literal

from trainer_kit.config.arguments import TrainingArguments

Event = Literal["log", "evaluate", "save"]

_READ: dict[Event, attrgetter[tuple[str, float | None]]] = {
    "log": attrgetter("logging_strategy", "logging_steps"),
    "evaluate": attrgetter("eval_strategy", "eval_steps"),
    "save": attrgetter("save_strategy", "save_steps"),
}
"""Read the arguments that schedule an event: its strategy, and the steps between two."""


def steps_between(steps: float, total_steps: int) -> int:
    """Return an interval in steps, which may be given as a fraction of all steps."""
    return int(steps) if steps >= 1 else max(1, math.ceil(steps * total_steps))


def warmup_length(args: TrainingArguments, total_steps: int) -> int:
    """Return the steps of the warmup, which may be given as a fraction of all steps."""
    return int(args.warmup_steps) or math.ceil(args.warmup_ratio * total_steps)


def evaluation_setting(args: TrainingArguments) -> str | None:
    """Return the setting that asks for evaluations during training; None without one."""
    if args.eval_strategy != "no":
        return f"eval_strategy={args.eval_strategy!r}"
    return "eval_on_start=True" if args.eval_on_start else None


class EventSchedule:
    """The records, evaluations and checkpoints that the arguments schedule, without those of `save_minutes`.

    Args:
        args: Arguments of the run. Each call reads them again, since a callback may change them.
    """

    def __init__(self, args: TrainingArguments) -> None:
        self._args = args

    def is_due_after_step(self, event: Event, step: int, total_steps: int) -> bool:
        """Return whether an event is due after a step because of the step's number.

        Args:
            event: The event.
            step: Number of the step, from 1.
            total_steps: Steps of the run, of which an interval may be a fraction.
        """
        strategy, interval = _READ[event](self._args)
        if strategy != "steps":
            return False
        is_first_record = event == "log" and step == 1 and self._args.logging_first_step
        steps = interval or self._args.logging_steps
        if steps < 1:
            steps = steps_between(steps, total_steps)
        return is_first_record or step % steps == 0

    def is_due_after_epoch(self, event: Event) -> bool:
        """Return whether an event is due at the end of each epoch."""
        return _READ[event](self._args)[0] == "epoch"

    def is_due_at_end(self, event: Event) -> bool:
        """Return whether an event is due after the last step, which may be in the middle of an epoch."""
        return _READ[event](self._args)[0] != "no"

    @property
    def saves_best(self) -> bool:
        """Whether a checkpoint is due after each evaluation that is the best so far."""
        args = self._args
        return args.save_strategy == "best" or (args.load_best_model_at_end and args.save_strategy != "no")

    @property
    def saves_before_first_step(self) -> bool:
        """Whether a checkpoint is due before the first step, so that a rollback always has one."""
        return self._args.nonfinite == "rollback"

    def steps(self, event: Event, taken: int, last: int, epoch_ends: Collection[int]) -> list[int]:
        """Return the steps after which an event is certainly due.

        Args:
            event: The event.
            taken: Steps that the run has taken already.
            last: The run's last step.
            epoch_ends: Steps at which an epoch ends.
        """
        closing = {*epoch_ends} if self.is_due_after_epoch(event) else set()
        closing |= {last} if self.is_due_at_end(event) else set()
        due = [
            step for step in range(taken + 1, last + 1) if step in closing or self.is_due_after_step(event, step, last)
        ]
        starts = {"save": self.saves_before_first_step, "evaluate": self._args.eval_on_start}
        return [0, *due] if taken == 0 and starts.get(event) else due
