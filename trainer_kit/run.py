"""`Run`: the state that the loop, checkpoints and callbacks share; `TrainOutput`: the result of a training."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from trainer_kit.config.arguments import TrainingArguments
from trainer_kit.profiling.time_ledger import Ledger
from trainer_kit.state import IntervalMeans, Requests, Stateful, TrainState
from trainer_kit.strategies.base import Strategy
from trainer_kit.strategies.grad_norms import GradientNorms
from trainer_kit.utils.units import GIB, format_duration, format_size


@dataclasses.dataclass(eq=False)
class Run:
    """The parts of a training run.

    Attributes:
        args: The arguments, validated.
        strategy: Owns device, precision and collectives.
        model: The model as the user gave it, on the strategy's device once training begins.
        optimizer: Made when training begins; None before.
        lr_scheduler: Stepped once per optimizer step; None before training begins.
        state: The counters.
        requests: The requests of callbacks to the loop.
        total_steps: Optimizer steps that the whole training takes.
        total_epochs: Epochs that the whole training takes, which may be fractional; infinity if the length of an epoch
            is not known.
        train_dataset: As the user gave it.
        eval_dataset: As the user gave it.
        train_sampler: As the user gave it; None: the arguments' order, or that of a loader.
        processing_class: Tokenizer or processor, saved with the model.
        local_loss: This rank's share of the last step's loss, a scalar on the device. The loss is the sum of the
            shares over all ranks. Reading it waits for the device.
        local_sums: This rank's sums of what the last step logged by `log_mean`, on the device.
        means: Means of the steps since the last record.
        last_norms: Norms of the last step's gradients before clipping, on the device.
        batch: The current micro-batch, on the device.
        ledger: The time spent on each activity.
        stateful: The user's own stateful objects by name; every checkpoint saves and restores them.
        copies_folder: Folder in host memory for copies of the state, which `PeerCopies` sets; None: no copies.
    """

    args: TrainingArguments
    strategy: Strategy
    model: torch.nn.Module
    optimizer: torch.optim.Optimizer | None = None
    lr_scheduler: Any = None
    state: TrainState = dataclasses.field(default_factory=TrainState)
    requests: Requests = dataclasses.field(default_factory=Requests)
    total_steps: int = 0
    total_epochs: float = 0.0
    train_dataset: Any = None
    eval_dataset: Any = None
    train_sampler: Any = None
    processing_class: Any = None
    local_loss: torch.Tensor | None = None
    local_sums: dict[str, tuple[Any, Any]] = dataclasses.field(default_factory=dict)
    means: IntervalMeans = dataclasses.field(default_factory=IntervalMeans)
    last_norms: GradientNorms | None = None
    batch: Any = None
    ledger: Ledger = dataclasses.field(default_factory=Ledger)
    stateful: dict[str, Stateful] = dataclasses.field(default_factory=dict)
    copies_folder: Path | None = None


class TrainOutput(NamedTuple):
    """The result of `Trainer.train`. `print()` shows the main metrics in one line.

    Attributes:
        global_step: Optimizer steps taken, including those before a resume.
        training_loss: Mean loss of all steps.
        metrics: train_loss, train_runtime (seconds), train_samples_per_second, train_steps_per_second,
            peak_memory_gib, epoch, and the callbacks' metrics of the whole run.
    """

    global_step: int
    training_loss: float
    metrics: dict[str, Any]

    def __repr__(self) -> str:
        known = {name: value for name, value in self.metrics.items() if isinstance(value, (int, float))}
        figures = [f"global_step={self.global_step}", f"training_loss={self.training_loss:.4g}"]
        figures += [_FORMS[name](known[name]) for name in _FORMS if name in known]
        return f"TrainOutput({', '.join(figures)}; {len(self.metrics)} values in .metrics)"


_FORMS: dict[str, Callable[[float], str]] = {
    "train_runtime": format_duration,
    "train_samples_per_second": "{:,.1f} samples/s".format,
    "peak_memory_gib": lambda gib: f"peak memory {format_size(gib * GIB)}",
}
