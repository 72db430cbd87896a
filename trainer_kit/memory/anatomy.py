"""`Anatomy`: the components of memory at the peak of a training step."""

from __future__ import annotations

import dataclasses
from typing import Any

from trainer_kit.utils.units import format_si, format_size

KINDS = {
    "weights": "the model's parameters, tied ones once",
    "buffers": "tensors of the model that are not parameters",
    "batch": "a micro-batch on the device",
    "gradients": "of the trainable parameters, in their dtype",
    "optimizer": "the state of the optimizer",
    "gathered": "the root unit and three more units, gathered while they are used",
    "casts": "autocast's copies of weights, kept by its cache in the forward pass, by autograd for the backward pass",
    "activations": "tensors that autograd keeps for the backward pass",
    "temporary": "results that are not kept, and workspaces of operators",
    "runtime": "the CUDA context and libraries",
}
"""Descriptions of the components, by name."""


@dataclasses.dataclass(frozen=True)
class Component:
    """One component of the memory.

    Attributes:
        name: "weights", "buffers", "batch", "gradients", "optimizer", "gathered" (units of FSDP), "casts" (autocast's
            copies of weights), "activations", "temporary" (results and workspaces) or "runtime" (CUDA and its
            libraries).
        nbytes: Bytes at the peak.
        source: How the figure was found: counted, measured and with which tool, or computed by which formula.
    """

    name: str
    nbytes: int
    source: str


@dataclasses.dataclass(frozen=True)
class Anatomy:
    """Memory of a device at the peak of an optimizer step, by component.

    Attributes:
        components: Components, without those of 0 bytes.
        peak: Bytes in use at the peak, the sum of the components.
        device: Type of the device, such as "cpu" or "cuda".
        parameters: Number of elements in the model's parameters; tied ones count once.
        trainable: Number of those elements that require a gradient.
        batch_size: Samples of a micro-batch.
        shape: Shapes of the batch's tensors, by name or position.
        model_flops: Floating-point operations of an optimizer step on one device, forward and backward, as
            `trainer_kit.profiling.flops` counts them; None if they were not counted.
        recomputed_flops: Additional operations of recomputation in the backward pass.
        inference: Whether the figures are those of a forward pass without gradients instead of an optimizer step.
        shards: Number of processes over which weights, gradients and optimizer state are sharded.
    """

    components: tuple[Component, ...]
    peak: int
    device: str
    parameters: int
    trainable: int
    batch_size: int
    shape: dict[str, list[int]] = dataclasses.field(default_factory=dict)
    model_flops: int | None = None
    recomputed_flops: int | None = None
    inference: bool = False
    shards: int = 1

    def nbytes(self, name: str) -> int:
        """Return the bytes of the component with this name; 0 if there is none."""
        return next((component.nbytes for component in self.components if component.name == name), 0)

    def peer_copies(self, processes: int) -> int:
        """Return the bytes of host memory that `PeerCopies` takes for each process of a run on several machines.

        These are two copies each of its part of a checkpoint and of its peer's. On one machine it is half of that.

        Args:
            processes: Number of processes of the run.
        """
        state = sum(map(self.nbytes, ("weights", "buffers", "optimizer"))) * self.shards
        return 4 * -(-state // max(processes, self.shards))

    @property
    def in_tensors(self) -> int:
        """Bytes of the peak from the device's allocator: all but the runtime's own."""
        return self.peak - self.nbytes("runtime")

    def table(self, measured: Anatomy | None = None) -> str:
        """Format the components as text: their names, sizes, bytes per parameter and descriptions.

        Args:
            measured: Another anatomy of the same step, shown in a second column; None for none.
        """
        others = measured.components if measured else ()
        found = {component.name for component in (*self.components, *others)}
        second = "measured" if measured else None
        lines = [_line("", "memory", second, "per weight", "what")]
        for name in KINDS:
            if name in found:
                other = measured.nbytes(name) if measured else None
                lines.append(self._row(name, self.nbytes(name), other, KINDS[name]))
        lines.append(self._row("peak", self.peak, measured.peak if measured else None, self._step()))
        return "\n".join(lines)

    def _row(self, name: str, nbytes: int, other: int | None, what: str) -> str:
        each = f"{nbytes / self.parameters:.2f} B" if self.parameters else ""
        return _line(name, format_size(nbytes), None if other is None else format_size(other), each, what)

    def _step(self) -> str:
        flops = f", {format_si(self.model_flops, 'FLOP')} of the model" if self.model_flops else ""
        work = "a forward pass with batches" if self.inference else "a step with micro-batches"
        sharded = f", sharded over {self.shards} processes" if self.shards > 1 else ""
        return f"of {work} of {self.batch_size} on {self.device}{sharded}{flops}"

    def to_dict(self) -> dict[str, Any]:
        """Return the anatomy as JSON-compatible values."""
        return {**dataclasses.asdict(self), "components": [*map(dataclasses.asdict, self.components)]}


def _line(name: str, memory: str, measured: str | None, each: str, what: str) -> str:
    second = "" if measured is None else f"{measured:>13}"
    return f"{name:<12}{memory:>12}{second}{each:>12}  {what}".rstrip()
