"""`Lookahead`: batches of an evaluation, fetched while the device works."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any, TypeVar

from trainer_kit.loss.batch import Counts

T = TypeVar("T")


@dataclasses.dataclass(eq=False)
class EvalBatch:
    """A batch as `Strategy.prepare_loader` takes it.

    Attributes:
        batch: The batch, on the host or the device.
        counts: Its counts.
    """

    batch: Any
    counts: Counts


class Lookahead:
    """An iterator over batches, of which the next one can be fetched while the device works."""

    def __init__(self, batches: Iterator[EvalBatch]) -> None:
        self._batches = batches
        self._fetched: list[EvalBatch] = []

    def __iter__(self) -> Iterator[EvalBatch]:
        return self

    def __next__(self) -> EvalBatch:
        return self._fetched.pop() if self._fetched else next(self._batches)

    def fetch(self) -> None:
        """Fetch the next batch, and begin to copy the one after it to the device; see `Strategy.prepare_loader`."""
        self._fetched.extend(itertools.islice(self._batches, 1))


def one_behind(outcomes: Iterator[T]) -> Iterator[T]:
    """Yield each outcome after the next pass is dispatched, so that the device works while the host counts."""
    waiting = None
    for outcome in outcomes:
        if waiting is not None:
            yield waiting
        waiting = outcome
    if waiting is not None:
        yield waiting
