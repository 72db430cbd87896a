"""The result of a training, from the moment when this start or this process began."""

from __future__ import annotations

import math
import time

from trainer_kit.callback import CallbackList
from trainer_kit.run import Run, TrainOutput


class Beginning:
    """The moment from which a process has trained.

    Args:
        run: The run.
    """

    def __init__(self, run: Run) -> None:
        self.step, self.samples, self._time = run.state.step, run.state.samples, time.perf_counter()

    def seconds(self) -> float:
        """Return the time since then."""
        return time.perf_counter() - self._time


def summarize(run: Run, events: CallbackList, begin: Beginning, seconds: float) -> TrainOutput:
    """Return the result of the training.

    - `step` (steps): Optimizer steps, those before a resume included.
    - `epoch` (epochs): Epochs, with the part of an incomplete one.
    - `train_loss` (as the loss): Mean over all steps, but those whose losses a lost process took with it.
    - `train_runtime` (s): Duration of this start.
    - `train_samples_per_second` (samples/s): Samples of this start, of all processes, by its duration.
    - `train_steps_per_second` (steps/s): Optimizer steps of this start by its duration.
    """
    state = run.state
    mean = state.loss_sum / state.loss_steps if state.loss_steps else math.nan
    metrics = {
        "step": state.step,
        "epoch": state.epochs,
        "train_loss": mean,
        "train_runtime": seconds,
        "train_samples_per_second": (state.samples - begin.samples) / seconds,
        "train_steps_per_second": (state.step - begin.step) / seconds,
    }
    return TrainOutput(state.step, mean, metrics | run.strategy.device_info.memory() | events.summary(run))
