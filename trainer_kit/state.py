"""What a run counts (`TrainState`), what listeners may ask of the loop (`Requests`), and the `Stateful` protocol."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class Stateful(Protocol):
    """Anything that can be kept in a checkpoint.

    The state is a tree of dicts, lists, tuples, tensors, numpy arrays, strings, numbers, booleans and None.
    """

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any: ...


@dataclasses.dataclass
class TrainState:
    """The counters of a run. Steps are optimizer steps, samples are counted over all processes.

    Attributes:
        step: Optimizer steps taken.
        epoch: Whole epochs finished.
        position: Samples of the current epoch already trained on: where a resume goes on.
        epoch_length: Samples in one epoch; 0 while unknown (an iterable dataset without length).
        samples: Samples trained on since the start, all epochs together.
        tokens: Tokens trained on since the start, padding left out (0 where batches hold no `input_ids`).
        skipped_steps: Steps not taken because their gradient was not finite (`nonfinite="skip"`).
        loss_sum: Sum of the losses of all steps taken, as far as they were read from the device.
        loss_steps: How many steps that sum holds.
        interval_loss_sum: The same sum since the last record.
        interval_steps: How many steps that sum holds.
        grad_norm: Norm of all gradients before clipping in the last step that was read.
        best_metric: Best value of `metric_for_best_model` so far.
        best_step: The step that gave it.
        passed_over: Samples that `nonfinite="rollback"` passes over, as (epoch, first position, position after).
        rollbacks: How often it went back.
        micro_batch: Samples that were found to fit at once (`auto_find_batch_size`); None where nothing was cut.
        eval_batch: The same in evaluations; None where all were seen to fit.
    """

    step: int = 0
    epoch: int = 0
    position: int = 0
    epoch_length: int = 0
    samples: int = 0
    tokens: int = 0
    skipped_steps: int = 0
    loss_sum: float = 0.0
    loss_steps: int = 0
    interval_loss_sum: float = 0.0
    interval_steps: int = 0
    grad_norm: float | None = None
    best_metric: float | None = None
    best_step: int | None = None
    passed_over: list[tuple[int, int, int]] = dataclasses.field(default_factory=list)
    rollbacks: int = 0
    micro_batch: int | None = None
    eval_batch: int | None = None

    @property
    def epochs(self) -> float:
        """Epochs trained, as a fraction: 1.5 in the middle of the second."""
        return self.epoch + (self.position / self.epoch_length if self.epoch_length else 0.0)

    def enter_epochs_of(self, length: int) -> None:
        """Takes the length of an epoch as it is now; a position at its end or beyond begins the next epoch."""
        self.epoch_length = length
        if length and self.position >= length:
            self.epoch, self.position = self.epoch + 1, 0

    def state_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        for field in dataclasses.fields(self):
            setattr(self, field.name, state_dict[field.name])


@dataclasses.dataclass
class Requests:
    """What callbacks ask for; the loop serves them after the step, in the order of the fields.

    A callback sets a flag to True, on one process or on all of them; at the end of the step the loop takes it up, for
    all processes. `exit_code` is set by a listener that stops the run from outside (Ctrl-C, a preempted machine): a
    checkpoint is saved (unless `args.save_strategy` is "no"), and `train()` leaves the process with it. `written` is
    set by the thread that writes checkpoints, when one is there (or has failed) and can be announced. `reason` says why
    the run shall stop, for the log and the report.
    """

    log: bool = False
    evaluate: bool = False
    save: bool = False
    stop: bool = False
    written: bool = False
    exit_code: int | None = None
    reason: str | None = None
