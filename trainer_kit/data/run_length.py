"""`RunLength`: the number of steps of a run, and the step of its schedule after a change of layout.

A schedule runs over samples. Its length is the number of steps that the whole run takes under the present layout. It
resumes at the step that this layout reaches with the samples trained on so far. If the layout never changes, that is
the number of steps taken.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from trainer_kit.config.arguments import TrainingArguments
from trainer_kit.data.iterable_loader import StreamLoader
from trainer_kit.data.map_loader import TrainLoader
from trainer_kit.data.sampling import Layout
from trainer_kit.run import Run
from trainer_kit.state import TrainState


@dataclasses.dataclass(frozen=True)
class RunLength:
    """The steps of a run.

    Attributes:
        layout: The present layout.
        last_step: Step at which the run ends, including the steps taken under other layouts.
        epochs: Epochs that the run takes, which may be fractional; infinity if the length of an epoch is not known.
        schedule_length: Steps of the schedule: those of a whole run under the present layout.
        schedule_step: Step of the schedule that comes next.
        units: Samples per step in which each step argument of the schedule (`warmup_steps`, `num_decay_steps`) is
            given, by name: the global batch size when it was set.
    """

    layout: Layout
    last_step: int
    epochs: float
    schedule_length: int
    schedule_step: int
    units: Mapping[str, int]

    def scheduled(self, args: TrainingArguments) -> TrainingArguments:
        """Return the arguments with the schedule's step numbers converted to steps of the present layout."""
        if args.max_steps > 0:
            return args
        numbers = step_numbers(args)
        scaled = {
            name: _scaled(steps, self.units[name], self.layout.global_batch_size) for name, steps in numbers.items()
        }
        if scaled == numbers:
            return args
        warmup = scaled.pop("warmup_steps")
        # Rounding may make a decay that fills the run one step too long.
        scaled = {name: min(steps, max(0, self.schedule_length - warmup)) for name, steps in scaled.items()}
        return dataclasses.replace(args, warmup_steps=warmup, lr_scheduler_kwargs=args.lr_scheduler_kwargs | scaled)

    def state_dict(self) -> dict[str, Any]:
        layout = self.layout
        return {
            "processes": layout.readers,
            "batch_size": layout.batch_size,
            "accumulation": layout.accumulation,
            "devices": layout.devices,
            "full_processes": layout.steps.readers,
            "full_devices": layout.steps.devices,
            "units": dict(self.units),
        }


def make_plan(
    run: Run, loader: TrainLoader | StreamLoader, earlier: tuple[Mapping[str, Any], Mapping[str, Any]] | None = None
) -> RunLength:
    """Return the length of a run at the position of `run.state`.

    With `max_steps` the schedule counts the steps themselves, whatever the layout.

    Args:
        run: The run.
        loader: The loader of the training batches; ranges that it skips take no steps.
        earlier: The `RunLength` state and the arguments in the checkpoint to resume from; None without a checkpoint.
    """
    args, state, layout = run.args, run.state, loader.layout
    units = dict.fromkeys(step_numbers(args), layout.global_batch_size)
    if earlier is not None:
        plan, before = earlier[0], step_numbers(earlier[1])
        units |= {name: plan["units"][name] for name, steps in step_numbers(args).items() if before.get(name) == steps}
    if args.max_steps > 0:
        epochs = _epochs_of(loader, state, args.max_steps)
        return RunLength(layout, args.max_steps, epochs, args.max_steps, state.step, units)
    length = _steps_of(loader, args.num_train_epochs)
    in_epoch = loader.steps_left(state.epoch, 0) - loader.steps_left(state.epoch, state.position)
    place = min(_steps_of(loader, state.epoch) + in_epoch, length)
    return RunLength(layout, state.step + length - place, args.num_train_epochs, max(1, length), place, units)


def step_numbers(args: TrainingArguments | Mapping[str, Any]) -> dict[str, int]:
    """Return the arguments that give a number of steps of the schedule, by name."""
    given = args if isinstance(args, Mapping) else vars(args)
    numbers = {"warmup_steps": given["warmup_steps"]}
    if "num_decay_steps" in given["lr_scheduler_kwargs"]:
        numbers["num_decay_steps"] = given["lr_scheduler_kwargs"]["num_decay_steps"]
    return numbers


def _scaled(steps: int, unit: int, window: int) -> int:
    """Convert steps of `unit` samples to steps of `window` samples; at least 1 unless `steps` is 0."""
    return max(1, round(steps * unit / window)) if steps and unit != window else steps


def _epochs_of(loader: TrainLoader | StreamLoader, state: TrainState, last_step: int) -> float:
    """Return the epochs of a run that ends at a step, if all epochs without skipped samples have the same steps."""
    rest, epoch = last_step - state.step, state.epoch
    left = loader.steps_left(epoch, state.position)
    last_cut = max((each for each, _, _ in loader.passed_over), default=-1)
    while rest > left and epoch <= last_cut:
        rest, epoch = rest - left, epoch + 1
        left = loader.steps_left(epoch, 0)
    usual = loader.steps_left(max(epoch, last_cut + 1), 0)
    return ((epoch + 1) * usual + rest - left) / usual if usual else math.inf


def _steps_of(loader: TrainLoader | StreamLoader, epochs: float) -> int:
    """Return the optimizer steps of the first `epochs` epochs, which may be fractional."""
    whole = int(epochs)
    if loader.has_equal_epochs:
        cut = {epoch for epoch, _, _ in loader.passed_over}
        usual = loader.steps_left(max(cut, default=-1) + 1, 0)
        steps = whole * usual + sum(loader.steps_left(epoch, 0) - usual for epoch in cut if epoch < whole)
    else:
        steps = sum(loader.steps_left(epoch, 0) for epoch in range(whole))
    if epochs == whole:
        return steps
    # Rounded, since 1.1 epochs of 10 steps are 11.000000000000002 steps.
    return steps + math.ceil(round((epochs - whole) * loader.steps_left(whole, 0), 6))
