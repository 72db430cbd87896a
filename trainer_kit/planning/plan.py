"""`TrainingPlan`: the result of a dry run, as text and as data."""

from __future__ import annotations

import dataclasses
from typing import Any

from trainer_kit.planning import render
from trainer_kit.planning.sections import (
    Batch,
    Compute,
    Data,
    EventSection,
    Hardware,
    MemorySection,
    Model,
    ScheduleSection,
    StartSection,
    StepsSection,
    Storage,
)


@dataclasses.dataclass(frozen=True)
class TrainingPlan:
    """Course of a training. `str()` formats it for a terminal of 80 columns.

    Attributes:
        data: Sizes of the datasets.
        batch: Composition of a step's samples.
        steps: Optimizer steps.
        start: Start of the run.
        model: Facts about the model.
        hardware: Device and precision, with the reasons for them.
        schedule: Learning rate; None if it cannot be computed (see `problems`).
        events: Steps of each event.
        callbacks: Callbacks that may request more events, or stop the run.
        storage: Checkpoints on the disk; None if none is saved.
        memory: Memory of a step.
        compute: FLOPs of the run; None if those of the model are unknown.
        problems: Errors that `train()` would raise, a sentence each.
        warnings: Warnings before training, a sentence each.
    """

    data: Data
    batch: Batch
    steps: StepsSection
    start: StartSection
    model: Model
    hardware: Hardware
    schedule: ScheduleSection | None
    events: tuple[EventSection, ...]
    callbacks: tuple[str, ...]
    storage: Storage | None
    memory: MemorySection
    compute: Compute | None
    problems: tuple[str, ...]
    warnings: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as JSON-compatible values."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        lines = [
            *render.data_lines(self.data),
            *render.batch_lines(self.batch),
            *render.steps_lines(self.steps, self.start),
            *render.model_lines(self.model),
            *render.hardware_lines(self.hardware),
            *(render.schedule_lines(self.schedule) if self.schedule is not None else []),
            *render.event_lines(self.events, self.callbacks),
            *(render.storage_lines(self.storage) if self.storage is not None else []),
            *render.memory_lines(self.memory),
            *(render.compute_lines(self.compute) if self.compute is not None else []),
            *render.bullets("train() would fail", self.problems),
            *render.bullets("warnings", self.warnings),
        ]
        return "\n".join(lines)
