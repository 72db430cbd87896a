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
        is_dummy: Whether it stands in for a batch, on a process without one in the last round. It is passed through the
            model only if the user's code has called collectives, such as a loss of the samples of all processes, since
            the others would wait in them. It counts for nothing.
    """

    batch: Any
    counts: Counts
    is_dummy: bool = False


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
