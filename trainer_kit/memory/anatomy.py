"""`Anatomy`: what memory is made of at the moment of a training step in which most of it is in use."""

from __future__ import annotations

import dataclasses
from typing import Any

KINDS = {
    "weights": "the model's parameters, tied ones once",
    "buffers": "tensors of the model that are not parameters",
    "batch": "a micro-batch on the device",
    "gradients": "of the trainable parameters, in their dtype",
    "optimizer": "the state of the optimizer",
    "casts": "autocast's copies of weights, kept by its cache in the forward pass, by autograd for the backward pass",
    "activations": "tensors that autograd keeps for the backward pass",
    "temporary": "results that are not kept, and workspaces of operators",
    "runtime": "the CUDA context and libraries",
}
"""What memory is used for, by the names that components have."""


@dataclasses.dataclass(frozen=True)
class Component:
    """One part of the memory.

    Attributes:
        name: One of `KINDS`.
        nbytes: Bytes at the moment of the peak.
        source: How the figure was found: counted, measured and by what, or by which formula of whose.
    """

    name: str
    nbytes: int
    source: str


@dataclasses.dataclass(frozen=True)
class Anatomy:
    """The memory of a device at the peak of an optimizer step, by component.

    Attributes:
        components: In the order of `KINDS`; those of 0 bytes are left out.
        peak: Bytes in use at the peak, the sum of the components.
        device: Type of the device, such as "cpu" or "cuda".
        parameters: Numbers in the model's weights; tied ones count once.
        trainable: Those of them that require a gradient.
        batch_size: Samples of a micro-batch.
        shape: Shapes of the batch's tensors, by name or position.
        model_flops: Floating-point operations of an optimizer step on one device, forward and backward, as
            `trainer_kit.profiling.flops` counts them; None where they were not counted.
        recomputed_flops: What the backward pass computes again, in addition to those.
        inference: Whether it is of a forward pass without gradients instead of an optimizer step.
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

    def nbytes(self, name: str) -> int:
        """Bytes of the component with this name; 0 where there is none."""
        return next((component.nbytes for component in self.components if component.name == name), 0)

    @property
    def in_tensors(self) -> int:
        """Bytes of the peak that the device's allocator gives out: all but the runtime's own."""
        return self.peak - self.nbytes("runtime")

    def table(self, measured: Anatomy | None = None) -> str:
        """The components as lines of text: their names, sizes, bytes a parameter and sources.

        Args:
            measured: Another anatomy of the same step, whose sizes are put beside.
        """
        others = measured.components if measured else ()
        found = {component.name for component in (*self.components, *others)}
        beside = "measured" if measured else None
        lines = [_line("", "memory", beside, "per weight", "what")]
        for name in KINDS:
            if name in found:
                other = measured.nbytes(name) if measured else None
                lines.append(self._row(name, self.nbytes(name), other, KINDS[name]))
        lines.append(self._row("peak", self.peak, measured.peak if measured else None, self._step()))
        return "\n".join(lines)

    def _row(self, name: str, nbytes: int, other: int | None, what: str) -> str:
        each = f"{nbytes / self.parameters:.2f} B" if self.parameters else ""
        return _line(name, size_text(nbytes), None if other is None else size_text(other), each, what)

    def _step(self) -> str:
        flops = f", {self.model_flops:.3g} FLOPs of the model" if self.model_flops else ""
        work = "a forward pass with batches" if self.inference else "a step with micro-batches"
        return f"of {work} of {self.batch_size} on {self.device}{flops}"

    def to_dict(self) -> dict[str, Any]:
        """All of it as strings, numbers, lists and dicts, as JSON has them."""
        return {**dataclasses.asdict(self), "components": [*map(dataclasses.asdict, self.components)]}


def size_text(nbytes: float) -> str:
    """Bytes as a person reads them: "1.50 GiB", "12.00 MiB", "512 B"."""
    for unit, size in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(nbytes) >= size:
            return f"{nbytes / size:.2f} {unit}"
    return f"{nbytes:.0f} B"


def _line(name: str, memory: str, measured: str | None, each: str, what: str) -> str:
    beside = "" if measured is None else f"{measured:>13}"
    return f"{name:<12}{memory:>12}{beside}{each:>12}  {what}".rstrip()
