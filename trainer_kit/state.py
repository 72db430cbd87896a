"""The counters of a run, the means since its last record, the requests to its loop, and the `Stateful` protocol."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from typing import Any, Protocol, TypeGuard, runtime_checkable

import torch


@runtime_checkable
class Stateful(Protocol):
    """An object that a checkpoint can save and restore.

    The state is a tree of dicts, lists, tuples, sets, deques, tensors, numpy arrays, strings, numbers, booleans and
    None.
    """

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any: ...


def is_stateful(value: Any) -> TypeGuard[Stateful]:
    """Return whether an object has a `state_dict` that can be called without arguments, and `load_state_dict`.

    That of `litdata.StreamingDataset` requires a position, which only its own loader knows.
    """
    if not isinstance(value, Stateful):
        return False
    try:
        inspect.signature(value.state_dict).bind()
    except TypeError:  # an argument is required
        return False
    except ValueError:  # a builtin function may have no signature
        pass
    return True


@dataclasses.dataclass
class TrainState:
    """The counters of a run. Steps are optimizer steps; samples are counted over all processes.

    Attributes:
        step: Optimizer steps taken.
        epoch: Whole epochs finished.
        position: Samples of the current epoch already trained on, from where a resume continues.
        epoch_length: Samples in one epoch; 0 while unknown (an iterable dataset without length).
        samples: Samples trained on since the start, all epochs together.
        tokens: Tokens trained on since the start, without padding (0 if batches have no `input_ids`).
        skipped_steps: Steps not taken because their gradient was not finite (`nonfinite="skip"`).
        loss_sum: Sum of the losses of all steps that were read from the device.
        loss_steps: Number of steps in `loss_sum`.
        interval_loss_sum: Sum of the losses read since the last record.
        interval_steps: Number of steps in `interval_loss_sum`.
        grad_norm: Norm of all gradients before clipping in the last step that was read; None before the first.
        learning_rate: Learning rate of the first group of parameters in the last step, a tensor if the optimizer has
            one; None before the first.
        best_metric: Best value of `metric_for_best_model` so far; None before the first.
        best_step: Step of the best value.
        passed_over: Ranges of samples that `nonfinite="rollback"` skips, as (epoch, start, stop).
        rollbacks: Number of rollbacks.
        micro_batch: Samples that fit into memory in one pass (`auto_find_batch_size`); None if nothing was cut.
        eval_batch: Samples that fit into memory in one pass of an evaluation; None if nothing was cut.
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
    learning_rate: float | torch.Tensor | None = None
    best_metric: float | None = None
    best_step: int | None = None
    passed_over: list[tuple[int, int, int]] = dataclasses.field(default_factory=list)
    rollbacks: int = 0
    micro_batch: int | None = None
    eval_batch: int | None = None

    @property
    def epochs(self) -> float:
        """Epochs trained, with the fraction of the current one: 1.5 in the middle of the second."""
        return self.epoch + (self.position / self.epoch_length if self.epoch_length else 0.0)

    def enter_epochs_of(self, length: int) -> None:
        """Set the length of an epoch in samples; a position at its end or beyond begins the next epoch."""
        self.epoch_length = length
        if length and self.position >= length:
            self.epoch, self.position = self.epoch + 1, 0

    def state_dict(self) -> dict[str, Any]:
        rate = self.learning_rate
        return {**dataclasses.asdict(self), "learning_rate": None if rate is None else float(rate)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        for field in dataclasses.fields(self):
            name = field.name  # earlier versions did not write the learning rate
            setattr(self, name, state_dict.get(name) if name == "learning_rate" else state_dict[name])


class IntervalMeans:
    """The values that `log_mean` logged in the steps since the last record.

    Attributes:
        sums: The sum of the steps' values and the number of these steps, by name.
    """

    def __init__(self) -> None:
        self.sums: dict[str, tuple[float, int]] = {}

    def add(self, values: Mapping[str, float]) -> None:
        """Add the values of a step."""
        for name, value in values.items():
            total, steps = self.sums.get(name, (0.0, 0))
            self.sums[name] = total + value, steps + 1

    def take(self) -> dict[str, float]:
        """Return the mean over the steps by name, and begin a new interval."""
        sums, self.sums = self.sums, {}
        return {name: total / steps for name, (total, steps) in sums.items()}

    def state_dict(self) -> dict[str, Any]:
        return {name: [total, steps] for name, (total, steps) in self.sums.items()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self.sums = {name: (total, steps) for name, (total, steps) in state_dict.items()}


@dataclasses.dataclass
class Requests:
    """Requests of callbacks, which the loop serves after the step in the order of the fields.

    A callback sets a flag to True on one process or on all of them. At the end of the step the loop serves it on all
    processes.

    Attributes:
        log: Make a record.
        evaluate: Evaluate.
        save: Save a checkpoint.
        copy: Copy the state to the memory of peers, see `PeerCopies`; not while a checkpoint is written.
        stop: End the training.
        written: A checkpoint is written or has failed. The thread that writes checkpoints sets it.
        join: Let the processes of other machines join, which are ready. The launcher makes the request.
        exit_code: Exit code with which `train()` leaves the process after a signal (Ctrl-C, preemption). A checkpoint
            is saved first, unless `args.save_strategy` is "no". None: no signal.
        reason: Why the run stops, for the log and the report.
        signal: Number of the signal that `train()` raises again before it leaves, for a handler that the program had
            installed. None: none.
    """

    log: bool = False
    evaluate: bool = False
    save: bool = False
    copy: bool = False
    stop: bool = False
    written: bool = False
    join: bool = False
    exit_code: int | None = None
    reason: str | None = None
    signal: int | None = None
