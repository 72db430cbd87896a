"""What a dry run finds, piece by piece."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Batch:
    """How the samples of a step come together.

    Attributes:
        per_device: Samples of one micro-batch on one device.
        devices: Devices of one process that a micro-batch is divided over.
        accumulation: Micro-batches of a step.
        processes: Processes of the run.
        samples: Samples of a step.
    """

    per_device: int
    devices: int
    accumulation: int
    processes: int
    samples: int


@dataclasses.dataclass(frozen=True)
class Data:
    """The datasets, in samples; None where one does not say.

    Attributes:
        train: Of the training dataset.
        epoch: Those of an epoch that are trained on.
        evaluation: Of each dataset to evaluate, by its name ("" for a single one).
    """

    train: int | None
    epoch: int | None
    evaluation: dict[str, int | None]


@dataclasses.dataclass(frozen=True)
class StepsSection:
    """The optimizer steps of the run.

    Attributes:
        first: Steps that are taken already, in the checkpoint that the run goes on from.
        last: The step at which it ends.
        left: Those in between.
        samples: Samples of these; None where the dataset has no length.
        per_epoch: Of one epoch; None where the dataset has no length.
        epochs: Epochs from the beginning to the last step; None where that is not known.
        short: Samples of an epoch's last step where they are fewer than in the others, else None.
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
    """Where the run begins.

    Attributes:
        folder: `output_dir`.
        checkpoint: Folder that it goes on from; None at the beginning.
        others: Checkpoints in output_dir that it does not go on from, which it would set aside.
    """

    folder: str
    checkpoint: str | None
    others: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Model:
    """The model.

    Attributes:
        name: Its class.
        parameters: Elements of all parameters, tied ones once.
        trainable: Those that require a gradient.
        tied: Names that are one and the same parameter.
        without_gradient: Trainable parameters that the loss does not depend on; None where that is not known.
    """

    name: str
    parameters: int
    trainable: int
    tied: tuple[tuple[str, ...], ...]
    without_gradient: tuple[str, ...] | None


@dataclasses.dataclass(frozen=True)
class Hardware:
    """Where the run computes, in what, and why.

    Attributes:
        strategy: Its class.
        device: Of this process.
        reason: Why that strategy and that device.
        precision: What forward passes compute in.
        precision_reason: Why that.
        weights: What the trained weights are kept in.
    """

    strategy: str
    device: str
    reason: str
    precision: str
    precision_reason: str
    weights: str


@dataclasses.dataclass(frozen=True)
class ScheduleSection:
    """The learning rate.

    Attributes:
        optimizer: Its class.
        name: The scheduler's name.
        points: (step, rate of that step), for the steps from 1 on; evenly spread where there are many.
        lowest: The smallest rate of all steps.
        highest: The greatest.
        note: What must be said beside; empty where nothing.
    """

    optimizer: str
    name: str
    points: tuple[tuple[int, float], ...]
    lowest: float
    highest: float
    note: str


@dataclasses.dataclass(frozen=True)
class EventSection:
    """When something happens.

    Attributes:
        name: "log", "evaluate", "save" or "epoch ends".
        rule: What asks for it.
        first: The first steps after which it happens.
        count: How often; None where that depends on the run.
        last: The last such step.
    """

    name: str
    rule: str
    first: tuple[int, ...]
    count: int | None
    last: int | None


@dataclasses.dataclass(frozen=True)
class Storage:
    """The checkpoints on the disk.

    Attributes:
        parts: Bytes of one, by what they are for.
        unknown: What else it holds whose size is not known; empty where nothing.
        size: Bytes of one.
        at_once: How many are there together at the most; None where nobody can tell.
        there: How many of them are there already.
        free: Bytes that are free there.
    """

    parts: dict[str, int]
    unknown: str
    size: int
    at_once: int | None
    there: int
    free: int


@dataclasses.dataclass(frozen=True)
class MemorySection:
    """The memory of a step at its peak, estimated.

    Attributes:
        parts: Bytes by component.
        peak: Bytes of all.
        available: Bytes that the device has; None where that is not known.
        batch: The shape of the batch, in words.
        note: Why there is no estimate; empty where there is one.
    """

    parts: dict[str, int]
    peak: int | None
    available: int | None
    batch: str
    note: str


@dataclasses.dataclass(frozen=True)
class Compute:
    """The arithmetic of the run.

    Attributes:
        step: Floating-point operations of a step over all processes, for batches of `MemorySection`'s shape. What
            activation checkpointing computes again is left out.
        run: Those of all steps that are left.
        peak: FLOP/s of one device at the most; None where that is not known.
        peak_source: Where that figure is from, or why there is none.
        seconds: What the run takes at least, if every device ran at its peak all the time.
    """

    step: int
    run: int
    peak: float | None
    peak_source: str
    seconds: float | None
