"""Estimated memory and FLOPs of a step."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from trainer_kit.data.map_loader import MicroBatch
from trainer_kit.memory import Anatomy, estimate
from trainer_kit.memory.advice import advise, capacity
from trainer_kit.memory.errors import first_line
from trainer_kit.planning.planned_training import PlannedTraining
from trainer_kit.planning.sections import Batch, Compute, MemorySection, StepsSection
from trainer_kit.profiling.peak_flops import computing_dtype, peak_of
from trainer_kit.strategies.base import Strategy
from trainer_kit.utils.pytree import tensors
from trainer_kit.utils.units import format_count, format_size


class CostSection:
    """Cost of a step.

    Args:
        subject: The training; its run's optimizer has the planned type.
        micro_batch: A micro-batch of the run; None if none could be read.
        strategy: The run's own strategy.
        processes: Number of processes of the run.
    """

    def __init__(
        self, subject: PlannedTraining, micro_batch: MicroBatch | None, strategy: Strategy, processes: int
    ) -> None:
        self.run = run = subject.run
        self.device = strategy.device
        self.processes = processes
        self.given: dict[str, Any] = {
            "compute_loss": subject.compute_loss, "optimizer": subject.optimizer, "device": self.device,
            "world_size": processes, "fsdp": strategy.sharding.count_shards(processes),
        }  # fmt: skip
        self.anatomy: Anatomy | None = None
        self.note = "no batch could be read"
        if micro_batch is None:
            return
        self.batch, self.samples = micro_batch.batch, micro_batch.samples
        try:
            found = estimate(run.model, run.args, self.batch, **self.given)
            self.anatomy = dataclasses.replace(found, batch_size=micro_batch.samples)
        except Exception as error:  # the model is the user's own
            self.note = first_line(error)

    def memory(self) -> MemorySection:
        """Return the memory of a step at its peak."""
        if self.anatomy is None:
            return MemorySection({}, None, None, "", self.note)
        parts = {each.name: each.nbytes for each in self.anatomy.components}
        return MemorySection(parts, self.anatomy.peak, capacity(self.device), _described(self.batch), "")

    def warnings(self) -> Iterator[str]:
        """Yield a warning if the memory does not suffice, with the options that would fit."""
        memory = self.memory()
        if memory.peak is None or memory.available is None or memory.peak <= memory.available:
            return
        advice = advise(self.run.model, self.run.args, self.batch, samples=self.samples, **self.given)
        means = [f"{each.name} needs {format_size(each.peak)}" for each in advice.options if each.fits]
        need, has = format_size(memory.peak), f"{self.device} has {format_size(memory.available)}"
        largest = format_count(advice.largest_batch_size or 0, "sample")
        if advice.largest_batch_size and self.run.args.auto_find_batch_size:
            yield (
                f"a step's micro-batches need {need} of memory, but {has}: auto_find_batch_size cuts them into parts "
                f"of at most {largest}"
            )
            return
        most = "" if advice.largest_batch_size is None else f"at most {largest} fit at once; "
        remedies = "; ".join(means) or "none of the usual means suffices"
        yield f"a step needs {need} of memory, but {has}; {most}{remedies}"

    def compute(self, batch: Batch, steps: StepsSection) -> Compute | None:
        """Return the FLOPs of the remaining steps; None if they are unknown.

        Args:
            batch: Composition of a step's samples.
            steps: Steps of the run.
        """
        if self.anatomy is None or not self.anatomy.model_flops:
            return None
        # If an epoch does not fill a step, the batch is smaller than the arguments request.
        sample = self.anatomy.model_flops / (self.anatomy.batch_size * batch.accumulation)
        full = batch.samples if steps.per_epoch != 1 or steps.short is None else steps.short
        step = round(sample * full)
        work = round(sample * (steps.left * full if steps.samples is None else steps.samples))
        try:
            peak = peak_of(self.device, computing_dtype(self.run.model, self.run.args.mixed_precision))
        except LookupError as error:
            return Compute(step, work, None, str(error), None)
        at_once = peak.flops_per_second * self.processes * batch.devices
        return Compute(step, work, peak.flops_per_second, peak.source, work / at_once)


def _described(batch: Any) -> str:
    shapes = dict.fromkeys(" x ".join(map(str, each.shape)) for each in tensors(batch) if each.ndim)
    return f"a batch of {', '.join(shapes)}"
