"""`SamePasses`: a check that all processes call the same units and use the same parameters."""

from __future__ import annotations

import collections
import itertools
import zlib
from collections.abc import Mapping

import torch
from torch.distributed.tensor import DTensor

from trainer_kit.strategies.collectives import Collectives

_MOST = 100_000
"""Calls of units that are kept, such as those of a long `generate`."""


class SamePasses:
    """Record of a step's passes, compared over the processes before the weights change.

    Units are gathered, and gradients are reduced, in the order in which a process calls for them. Where a process skips
    a unit that another one calls, or uses another parameter of a unit, tensors of the same size are mixed without an
    error.

    Args:
        collectives: The collectives of the run.

    Attributes:
        is_recording: Whether `record_unit` has an effect.
    """

    def __init__(self, collectives: Collectives) -> None:
        self.is_recording = True
        self._collectives = collectives
        self._units: collections.deque[str] = collections.deque(maxlen=_MOST)  # called since the last check
        self._used: list[dict[str, int | None]] = []  # by backward pass: reductions of each parameter's gradient

    def record_unit(self, name: str) -> None:
        """Record a forward pass of a unit."""
        if self.is_recording:
            self._units.append(name)

    def record_gradients(self, named: Mapping[str, torch.Tensor]) -> None:
        """Record which parameters took part in a backward pass."""
        self._used.append({name: _reductions(parameter) for name, parameter in named.items()})

    def check(self) -> None:
        """Compare the passes since the last check over all processes. Collective.

        Raises:
            ValueError: If they differ; the message names the first difference. Raised on all processes.
        """
        own = [*self._units], self._used
        self._units.clear()
        self._used = []
        checksum = zlib.crc32(repr(own).encode()) >> 8  # small enough for a sum of squares
        total, squares = self._collectives.all_reduce_ints([checksum, checksum**2])
        if squares * self._collectives.world_size == total**2:
            return
        first, *others = self._collectives.gather_object(own)
        for rank, other in enumerate(others, start=1):
            here, there = self._collectives.describe_rank(0), self._collectives.describe_rank(rank)
            pairs = itertools.zip_longest(first[0], other[0], fillvalue="none")
            for one, another in ((one, another) for one, another in pairs if one != another):
                raise ValueError(
                    f"processes called different units of the model: {here} {one!r} where {there} called {another!r}; "
                    "with FSDP all call the same ones in the same order, so switch off LayerDrop and skips that depend "
                    "on the data"
                )
            for used, used_there in zip(first[1], other[1], strict=False):
                for name in (name for name in used if used[name] != used_there.get(name)):
                    raise ValueError(
                        f"{name!r} had a part in the loss on some processes only ({here} and {there} differ); with "
                        "FSDP all use the same parameters in each backward pass, so add 0 * parameter.sum() in the "
                        "model's forward where one is not used, or freeze it"
                    )


def _reductions(parameter: torch.Tensor) -> int | None:
    """Return a number that grows with each reduction of a gradient; None without a gradient."""
    gradient = parameter.grad
    if gradient is None:
        return None
    return (gradient.to_local() if isinstance(gradient, DTensor) else gradient)._version
