"""Steps after which a run logs, evaluates and saves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from trainer_kit.config.event_schedule import Event, EventSchedule, steps_between
from trainer_kit.data.iterable_loader import StreamLoader
from trainer_kit.data.map_loader import TrainLoader
from trainer_kit.planning.sections import EventSection
from trainer_kit.run import Run

_SHOWN = 4
"""Number of steps shown per event."""


class Cadence:
    """Steps of the run's events, as far as they are known in advance.

    Args:
        run: Run at its starting point, with its number of steps.
        loader: Loader of its training batches.

    Attributes:
        schedule: Schedule of the events.
        samples: Samples of the remaining steps; None if the dataset has no length.
        epoch_ends: Steps at which an epoch ends; None if the dataset has no length.
        logs: Steps after which a record is written.
        evaluations: Steps after which the model is evaluated.
        saves: Steps after which a checkpoint is certainly saved.
        may_save: Further possible steps: after evaluations that may be the best so far.
    """

    def __init__(self, run: Run, loader: TrainLoader | StreamLoader) -> None:
        self.run, self.schedule = run, EventSchedule(run.args)
        self.samples: int | None = None
        self.epoch_ends: list[int] | None = None
        if loader.epoch_length:
            epochs = [*_epochs(run, loader)]
            self.samples = sum(epoch.samples for epoch in epochs)
            self.epoch_ends = [epoch.last_step for epoch in epochs if epoch.is_whole]
        self.logs, self.saves = self._steps("log"), self._steps("save")
        self.evaluations = self._steps("evaluate") if run.eval_dataset is not None else []
        self.may_save = sorted({*self.evaluations} - {*self.saves}) if self.schedule.saves_best else []

    def _steps(self, event: Event) -> list[int]:
        return self.schedule.steps(event, self.run.state.step, self.run.total_steps, self.epoch_ends or ())

    @property
    def planned_saves(self) -> int | None:
        """Largest number of checkpoints that are committed; None if it depends on the time."""
        return None if self.run.args.save_minutes is not None else len(self.saves) + len(self.may_save)

    def facts(self) -> tuple[EventSection, ...]:
        """Return the plan's sections on the events."""
        args = self.run.args
        logs = "never" if args.logging_strategy == "no" else self._rule(args.logging_strategy, args.logging_steps)
        if args.logging_strategy == "steps":
            logs += f"{', step 1' * args.logging_first_step} and at the end"
        if self.run.eval_dataset is None:
            evaluates = "never, without eval_dataset"
        else:
            rules = [] if args.eval_strategy == "no" else [self._rule(args.eval_strategy, args.eval_steps or 0)]
            evaluates = " and ".join(["before the first step"] * args.eval_on_start + rules) or "never"
        ends = self.epoch_ends
        return (
            _event("log", logs, self.logs),
            _event("evaluate", evaluates, self.evaluations),
            self._save_event(),
            _event("epoch ends", "", ends)
            if ends is not None
            else EventSection("epoch ends", "not known in advance", (), None, None),
        )

    def _rule(self, strategy: str, interval: float) -> str:
        if strategy == "epoch":
            return "after each epoch"
        steps = steps_between(interval, self.run.total_steps)
        return "after each step" if steps == 1 else f"every {steps:,} steps"

    def _save_event(self) -> EventSection:
        args = self.run.args
        if args.save_strategy == "no":
            return _event("save", "never", [])
        rules = [] if args.save_strategy in ("best", "minutes") else [self._rule(args.save_strategy, args.save_steps)]
        if args.save_minutes is not None:
            rules.append(f"every {args.save_minutes:g} minutes")
        if self.may_save:
            rules.append(f"after each best evaluation (at most {len(self.evaluations):,})")
        event = _event("save", " and ".join([", ".join(rules), "at the end"] if rules else ["at the end"]), self.saves)
        if self.may_save or args.save_minutes is not None:
            return EventSection(event.name, event.rule, event.first, None, event.last)
        return event


def _event(name: str, rule: str, steps: Sequence[int]) -> EventSection:
    return EventSection(name, rule, tuple(steps[:_SHOWN]), len(steps), steps[-1] if steps else None)


class _Epoch(NamedTuple):
    """The remaining part of an epoch.

    Attributes:
        last_step: Its last step.
        samples: Samples of its steps.
        is_whole: Whether the run reaches the end of the epoch.
    """

    last_step: int
    samples: int
    is_whole: bool


def _epochs(run: Run, loader: TrainLoader | StreamLoader) -> Iterator[_Epoch]:
    """Yield the epochs in which the run takes a step."""
    step, epoch, position = run.state.step, run.state.epoch, run.state.position
    while step < run.total_steps:
        left = loader.steps_left(epoch, position)
        steps = min(left, run.total_steps - step)
        samples = min(steps * loader.layout.global_batch_size, loader.epoch_length - position)
        step, epoch, position = step + steps, epoch + 1, 0
        if steps:
            yield _Epoch(step, samples, steps == left)
