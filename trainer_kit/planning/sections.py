"""Sections of a dry run's plan."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Batch:
    """Composition of a step's samples.

    Attributes:
        per_device: Samples of one micro-batch on one device.
        devices: Devices of one process that share a micro-batch.
        accumulation: Micro-batches of a step.
        processes: Number of processes that read samples of their own.
        samples: Samples of a step.
        full_devices: Devices of a process in the run whose steps are kept (`on_resize`); else `devices`.
        full_processes: Its processes; else `processes`.
        shares: Samples that each device has of a kept step, or batches if the data comes in batches of its own; else
            empty.
    """

    per_device: int
    devices: int
    accumulation: int
    processes: int
    samples: int
    full_devices: int
    full_processes: int
    shares: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Data:
    """Number of samples in the datasets; None for a dataset without a length.

    Attributes:
        train: Samples of the training dataset.
        epoch: Samples of an epoch that are trained on.
        evaluation: Samples of each evaluation dataset, by name ("" for a single one).
    """

    train: int | None
    epoch: int | None
    evaluation: dict[str, int | None]


@dataclasses.dataclass(frozen=True)
class StepsSection:
    """Optimizer steps of the run.

    Attributes:
        first: Steps already taken in the checkpoint that the run resumes from.
        last: Step at which the run ends.
        left: Number of steps from `first` to `last`.
        samples: Samples of these steps; None if the dataset has no length.
        per_epoch: Steps of one epoch; None if the dataset has no length.
        epochs: Epochs from the beginning to the last step; None if unknown.
        short: Samples of an epoch's last step if they are fewer than in the others, else None.
    """

    first: int
    last: int
    left: int
    samples: int | None
    per_epoch: int | None
    epochs: float | None
    short: int | None


@dataclasses.dataclass(frozen=True)
class StartSection:
    """Start of the run.

    Attributes:
        folder: Value of `output_dir`.
        checkpoint: Folder of the checkpoint that the run resumes from; None for a run from step 0.
        others: Other checkpoints in `output_dir`, which the run would move aside.
        can_resume: Whether one of them is no checkpoint of transformers' Trainer, which no run resumes from.
    """

    folder: str
    checkpoint: str | None
    others: tuple[str, ...]
    can_resume: bool


@dataclasses.dataclass(frozen=True)
class Model:
    """Facts about the model.

    Attributes:
        name: Name of its class.
        parameters: Number of elements of all parameters; tied ones count once.
        trainable: Number of elements that require a gradient.
        tied: Groups of names that share one parameter.
        without_gradient: Trainable parameters that the loss does not depend on; None if unknown.
    """

    name: str
    parameters: int
    trainable: int
    tied: tuple[tuple[str, ...], ...]
    without_gradient: tuple[str, ...] | None


@dataclasses.dataclass(frozen=True)
class Hardware:
    """Device and precision of the run, with the reasons for them.

    Attributes:
        strategy: Class of the strategy.
        device: Device of this process.
        reason: Reason for the strategy and the device.
        precision: Precision of forward passes.
        precision_reason: Reason for the precision.
        weights: Dtype of the trained weights.
    """

    strategy: str
    device: str
    reason: str
    precision: str
    precision_reason: str
    weights: str


@dataclasses.dataclass(frozen=True)
class ScheduleSection:
    """Learning rate of the run.

    Attributes:
        optimizer: Class of the optimizer.
        name: Name of the scheduler.
        points: Pairs (step, rate of that step), with steps from 1; evenly spaced if there are many.
        lowest: Smallest rate of all steps.
        highest: Largest rate of all steps.
        note: Additional remark; empty if there is none.
    """

    optimizer: str
    name: str
    points: tuple[tuple[int, float], ...]
    lowest: float
    highest: float
    note: str


@dataclasses.dataclass(frozen=True)
class EventSection:
    """Steps of one event.

    Attributes:
        name: "log", "evaluate", "save" or "epoch ends".
        rule: Description of the event's schedule.
        first: First steps after which it happens.
        count: Number of times; None if that depends on the run.
        last: Last such step; None if there is none.
    """

    name: str
    rule: str
    first: tuple[int, ...]
    count: int | None
    last: int | None


@dataclasses.dataclass(frozen=True)
class Storage:
    """Checkpoints on the disk.

    Attributes:
        parts: Bytes of one checkpoint by content.
        unknown: Further content of unknown size; empty if there is none.
        size: Bytes of one checkpoint.
        at_once: Largest number of checkpoints at the same time; None if unknown.
        there: Number of checkpoints that exist already.
        free: Free bytes on the disk.
        copies_folder: Folder in host memory for copies, see `PeerCopies`; None: no copies.
    """

    parts: dict[str, int]
    unknown: str
    size: int
    at_once: int | None
    there: int
    free: int
    copies_folder: str | None = None


@dataclasses.dataclass(frozen=True)
class MemorySection:
    """Estimated memory of a step at its peak.

    Attributes:
        parts: Bytes by component.
        peak: Bytes of all components; None without an estimate.
        available: Bytes of the device's memory; None if unknown.
        batch: Shape of the batch, in words.
        note: Reason for a missing estimate; empty if there is one.
    """

    parts: dict[str, int]
    peak: int | None
    available: int | None
    batch: str
    note: str


@dataclasses.dataclass(frozen=True)
class Compute:
    """FLOPs of the run.

    Attributes:
        step: Floating-point operations of a step over all processes, for batches of `MemorySection`'s shape, without
            recomputation by activation checkpointing.
        run: Floating-point operations of all remaining steps.
        peak: Peak FLOP/s of one device; None if unknown.
        peak_source: Source of the peak, or the reason why it is unknown.
        seconds: Shortest duration of the run in seconds, with every device at its peak all the time; None if unknown.
    """

    step: int
    run: int
    peak: float | None
    peak_source: str
    seconds: float | None
