"""`Operations`: counts the floating-point operations of a training by the shapes of its batches."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from trainer_kit.profiling.flops import FlopCounter, Flops, count_on_fakes

if TYPE_CHECKING:
    from trainer_kit.run import Run

_MOST_STEPS = 8
"""Maximal steps counted while they run; other shapes are scaled by their number of elements, padding included."""


class Operations:
    """Count the operations of a batch of each shape in some steps, and sum up the operations of the run.

    Attributes:
        due: Number of next steps to count.
        unknown: Steps to count so that no batch in the sum is scaled: one per shape that was scaled, and one if
            parameters were frozen or unfrozen since.
        reason: Why operations are not known, for the log; None if they are.
    """

    def __init__(self) -> None:
        self.due = self.unknown = 0
        self.reason: str | None = None
        self._left = 0
        self._counts_on_fakes = False
        self._counter: FlopCounter | None = None
        self._noted, self._batch = Flops(), 0  # operations before the latest batch, and its number
        self._known: dict[int, tuple[int, Flops]] = {}  # by id of the shape: elements, operations of one batch
        self._taken: dict[int, int] = {}  # by id of the shape: batches in the sum
        self._sum = Flops()
        self._trained = 0  # parameters that need a gradient

    def begin(self, run: Run) -> None:
        """Reset everything at the beginning of a training."""
        self.stop()
        self._known, self._sum, self.reason = {}, Flops(), None
        self._trained = _trained(run.model)
        self._take(run)
        is_compiled = any(
            getattr(module, "_compiled_call_impl", None) is not None or hasattr(module, "_orig_mod")
            for module in run.model.modules()
        )
        # A process that computes a part of each layer would count a part of its operators.
        self._counts_on_fakes = is_compiled or run.strategy.collectives.reader_size > 1
        if run.strategy.static_shapes:
            self.reason = "steps are recorded and compiled as a whole, where counting would make them compile again"
        self._left = 0 if self.reason or self._counts_on_fakes else _MOST_STEPS
        self.due, self.unknown = min(self._left, 1), 0

    def start(self, run: Run) -> None:
        """Start counting a step. Call it at the step's beginning, since a loader must not start workers under it."""
        self.stop()
        self.so_far(run)
        self._left, self.due = max(0, self._left - 1), max(0, self.due - 1)
        counter = self._counter = FlopCounter(lambda: self._counts(run))
        self._noted, self._batch = Flops(), run.strategy.shapes.batches
        counter.__enter__()  # type: ignore[no-untyped-call]

    def _counts(self, run: Run) -> bool:
        """Return whether an operator belongs to the forward or backward pass of the latest batch.

        Operators before it belong to a probe of the loss or to an attempt that ran out of memory.
        """
        if run.ledger.activity not in ("forward", "backward"):
            return False
        if self._batch != run.strategy.shapes.batches:
            assert self._counter is not None
            self._batch, self._noted = run.strategy.shapes.batches, self._counter.flops
        return True

    def note(self, run: Run) -> None:
        """Record the operations of a micro-batch after its backward pass, in a counted step."""
        assert self._counter is not None
        shape, flops = run.strategy.shapes.latest, self._counter.flops.minus(self._noted)
        assert shape is not None
        if self._counter.uncounted:
            operator, error = next(iter(self._counter.uncounted.items()))
            self.reason = f"{operator} cannot be counted ({error})"
        if self._trained != (trained := _trained(run.model)):
            self._known, self._trained = {}, trained
        self._known[id(shape)] = (shape.elements, flops)
        self._sum = self._sum.plus(flops)
        self._take(run)

    def stop(self) -> None:
        """Stop counting."""
        if self._counter is not None:
            self._counter.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            self._counter = None

    def expect(self, unknown: int) -> None:
        """Set the number of next steps to count to `unknown`, at most the number of steps left to count."""
        self.due = min(self._left, unknown)

    def so_far(self, run: Run) -> Flops:
        """Return the operations of this process since training began; zero if they are not known."""
        shapes = run.strategy.shapes
        if self._counts_on_fakes and not self._known and self.reason is None:
            self._count_compiled(run)
        if not shapes.complete and self.reason is None:
            self.reason = "batches came in more shapes than are kept"
        self.unknown = int(self._trained != _trained(run.model))
        for shape in shapes.of("training"):
            batches = shape.count - self._taken.get(id(shape), 0)
            if batches and self._known:
                self.unknown += id(shape) not in self._known
                self._sum = self._sum.plus(self._of(id(shape), shape.elements).times(batches))
        self._take(run)
        return self._sum

    def _take(self, run: Run) -> None:
        """Mark all batches so far as included in the sum."""
        self._taken = {id(shape): shape.count for shape in run.strategy.shapes.of("training")}

    def _of(self, shape: int, elements: int) -> Flops:
        if shape in self._known:
            return self._known[shape][1]
        nearest, flops = min(self._known.values(), key=lambda known: abs(math.log(elements / known[0])))
        return flops.times(elements / nearest)

    def _count_compiled(self, run: Run) -> None:
        shape = run.strategy.shapes.latest
        if shape is None or shape.kind != "training":
            return
        try:
            with run.strategy.own_passes(run.model):
                flops = count_on_fakes(run.model, run.batch, run.strategy.autocast())
        except RuntimeError as error:
            self.reason = f"the model is compiled, and does not run on fake tensors ({error})"
        else:
            self._known[id(shape)] = (shape.elements, flops)


def _trained(model: torch.nn.Module) -> int:
    return sum(parameter.requires_grad for parameter in model.parameters())
