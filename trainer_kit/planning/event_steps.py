"""Steps after which a run logs, evaluates and saves."""

from __future__ import annotations

from collections.abc import Sequence

from trainer_kit.config.arguments import TrainingArguments
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
        epoch_ends: Steps at which an epoch ends; None if the dataset has no length.
        logs: Steps after which a record is written.
        evaluations: Steps after which the model is evaluated.
        saves: Steps after which a checkpoint is certainly saved.
        may_save: Further possible steps: after evaluations that may be the best so far.
    """

    def __init__(self, run: Run, loader: TrainLoader | StreamLoader) -> None:
        self.run = run
        args, first, end = run.args, run.state.step, run.total_steps
        self.epoch_ends = _epoch_ends(run, loader) if loader.epoch_length else None
        closing = {*(self.epoch_ends or ()), end}
        steps = range(first + 1, end + 1)
        self.logs = [step for step in steps if args.logs_after(step) or (args.logging_strategy != "no" and step == end)]
        if args.logging_strategy == "epoch":
            self.logs = sorted(closing & {*steps})
        self.evaluations = [step for step in steps if args.evaluates_after(step)]
        if args.eval_strategy == "epoch":
            self.evaluations = sorted(closing & {*steps})
        if run.eval_dataset is None:
            self.evaluations = []
        self.saves = self._saves(args, steps)
        keeps_best = args.save_strategy == "best" or (args.load_best_model_at_end and args.save_strategy != "no")
        self.may_save = sorted({*self.evaluations} - {*self.saves}) if keeps_best else []

    def _saves(self, args: TrainingArguments, steps: range) -> list[int]:
        if args.save_strategy == "no" or not steps:
            return []
        saves = {step for step in steps if args.saves_after(step)} | {steps[-1]}
        if args.save_strategy == "epoch":
            saves |= {*(self.epoch_ends or ())}
        if args.nonfinite == "rollback" and self.run.state.step == 0:
            saves.add(0)
        return sorted(saves)

    @property
    def planned_saves(self) -> int | None:
        """Largest number of checkpoints that are committed; None if it depends on the time."""
        return None if self.run.args.save_minutes is not None else len(self.saves) + len(self.may_save)

    def facts(self) -> tuple[EventSection, ...]:
        """Return the plan's sections on the events."""
        args = self.run.args
        logs = "never" if args.logging_strategy == "no" else _rule(args.logging_strategy, args.logging_steps)
        if args.logging_strategy == "steps":
            logs += f"{', step 1' * args.logging_first_step} and at the end"
        if self.run.eval_dataset is None:
            evaluates = "never, without eval_dataset"
        else:
            evaluates = "never" if args.eval_strategy == "no" else _rule(args.eval_strategy, args.eval_steps or 0)
        ends = self.epoch_ends
        return (
            _event("log", logs, self.logs),
            _event("evaluate", evaluates, self.evaluations),
            self._save_event(),
            _event("epoch ends", "", ends)
            if ends is not None
            else EventSection("epoch ends", "not known in advance", (), None, None),
        )

    def _save_event(self) -> EventSection:
        args = self.run.args
        if args.save_strategy == "no":
            return _event("save", "never", [])
        rules = [] if args.save_strategy in ("best", "minutes") else [_rule(args.save_strategy, args.save_steps)]
        if args.save_minutes is not None:
            rules.append(f"every {args.save_minutes:g} minutes")
        if self.may_save:
            rules.append(f"after each best evaluation (at most {len(self.evaluations):,})")
        event = _event("save", " and ".join([", ".join(rules), "at the end"] if rules else ["at the end"]), self.saves)
        if self.may_save or args.save_minutes is not None:
            return EventSection(event.name, event.rule, event.first, None, event.last)
        return event


def _rule(strategy: str, steps: int) -> str:
    if strategy == "epoch":
        return "after each epoch"
    return "after each step" if steps == 1 else f"every {steps:,} steps"


def _event(name: str, rule: str, steps: Sequence[int]) -> EventSection:
    return EventSection(name, rule, tuple(steps[:_SHOWN]), len(steps), steps[-1] if steps else None)


def _epoch_ends(run: Run, loader: TrainLoader | StreamLoader) -> list[int]:
    """Return the steps at which an epoch ends, up to the run's last."""
    state, ends = run.state, []
    step, epoch = state.step + loader.steps_left(state.epoch, state.position), state.epoch
    while step <= run.total_steps:
        if step > state.step:
            ends.append(step)
        epoch += 1
        step += loader.steps_left(epoch, 0)
    return ends
