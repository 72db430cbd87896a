"""`TrainingPlan`: what a dry run found, for people and for machines."""

from __future__ import annotations

import dataclasses
from typing import Any

from trainer_kit.planning import render as text
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
    """What a training would do. `str()` shows it for a terminal of 80 columns.

    Attributes:
        data: The datasets.
        batch: How the samples of a step come together.
        steps: The optimizer steps.
        start: Where the run begins.
        model: The model.
        hardware: Where it computes, in what, and why.
        schedule: The learning rate; None where there is none to be had (see `problems`).
        events: When what happens.
        callbacks: Those that may request more, or stop the run.
        storage: The checkpoints on the disk; None where none is saved.
        memory: Of a step.
        compute: The arithmetic; None where the model's is not known.
        problems: What `train()` would end with, a sentence each.
        warnings: What one should know before, a sentence each.
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
        """The same as dicts, lists, numbers, text and None, for JSON."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        lines = [
            *text.data_lines(self.data),
            *text.batch_lines(self.batch),
            *text.steps_lines(self.steps, self.start),
            *text.model_lines(self.model),
            *text.hardware_lines(self.hardware),
            *(text.schedule_lines(self.schedule) if self.schedule is not None else []),
            *text.event_lines(self.events, self.callbacks),
            *(text.storage_lines(self.storage) if self.storage is not None else []),
            *text.memory_lines(self.memory),
            *(text.compute_lines(self.compute) if self.compute is not None else []),
            *text.bullets("train() would fail", self.problems),
            *text.bullets("warnings", self.warnings),
        ]
        return "\n".join(lines)
