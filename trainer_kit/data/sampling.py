"""Who sees which sample when: everything here is a pure function of (seed, epoch, position).

The order of an epoch is a permutation of the dataset that does not depend on batch size, accumulation or number of
processes. An optimizer step takes the next `Layout.global_batch_size` samples of it, a position counts samples over all
processes; so a resume is arithmetic, also under another layout.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch

_MASK = 0xFFFFFFFFFFFFFFFF
_STAND_IN = 2
"""Samples of a stand-in: batch norm refuses a single one."""

GROUP = 1024
"""Samples that `group_by_length` sorts together. A constant, so that no layout changes the order."""


class Layout(NamedTuple):
    """How the samples of a step are spread.

    Attributes:
        batch_size: Samples of one micro-batch on one process.
        accumulation: Micro-batches of one step on one process.
        world_size: Processes.
        rank: This process.
        limit: Samples that a process computes at once, where its micro-batches are cut into parts; the loop takes each
            part as a micro-batch. Which samples a step and a process have does not depend on it.
    """

    batch_size: int
    accumulation: int = 1
    world_size: int = 1
    rank: int = 0
    limit: int | None = None

    @property
    def global_micro_batch_size(self) -> int:
        """Samples that all processes take at once."""
        return self.batch_size * self.world_size

    @property
    def global_batch_size(self) -> int:
        """Samples of one optimizer step over all processes."""
        return self.global_micro_batch_size * self.accumulation

    @property
    def at_once(self) -> int:
        """Samples that a process computes at once."""
        return self.batch_size if self.limit is None else min(self.batch_size, self.limit)

    def parts(self, samples: int) -> int:
        """Into how many parts a micro-batch of so many samples is cut."""
        return 1 if self.limit is None else -(-samples // self.limit)

    def cut(self, start: int, stop: int) -> list[tuple[int, int]]:
        """(start, stop) of each part of a micro-batch at these positions: as few as can be, and as equal."""
        least, more = divmod(stop - start, parts := self.parts(stop - start))
        sizes = [least + (number < more) for number in range(parts)]
        ends = [*itertools.accumulate(sizes, initial=start)]
        return [*itertools.pairwise(ends)]


class BatchIndices(NamedTuple):
    """One micro-batch of one process: what is fetched, and its place in the step.

    Attributes:
        epoch: Number of the epoch, from 0.
        start: Position of its first sample in the epoch's order.
        indices: Dataset indices.
        is_dummy: This process has no samples left in the step, but takes part with weight zero.
        micro_batch_index: Number of the micro-batch in the step, from 0.
        is_last: Whether it is the step's last.
        window_start: Position in the epoch where this step begins.
        window_stop: Position in the epoch after this step.
        closes_epoch: Whether this step is the epoch's last.
    """

    epoch: int
    start: int
    indices: list[int]
    is_dummy: bool
    micro_batch_index: int
    is_last: bool
    window_start: int
    window_stop: int
    closes_epoch: bool


def mix(*numbers: int) -> int:
    """A well-spread number below 2**63 from some integers (the finalizer of splitmix64, Steele et al. 2014)."""
    state = 0
    for number in numbers:
        state = (state + number + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state >> 1


def permutation(length: int, seed: int, epoch: int, lengths: np.ndarray | None = None) -> torch.Tensor:
    """The order of one epoch.

    Args:
        length: Samples in the dataset.
        seed: The run's seed.
        epoch: Number of the epoch, from 0.
        lengths: Length of each sample, shape [length]: samples of like length then stand together. The permutation
            is cut into groups of `GROUP`, each sorted from long to short, as in transformers' `group_by_length`;
            the longest sample stands first, so that running out of memory shows at once.

    Returns:
        Dataset indices, int64, shape [length].
    """
    generator = torch.Generator().manual_seed(mix(seed, epoch))
    order = torch.randperm(length, generator=generator)
    if lengths is None or length == 0:
        return order
    shuffled = order.numpy()
    groups = [shuffled[start : start + GROUP] for start in range(0, length, GROUP)]
    groups = [group[np.argsort(-lengths[group], kind="stable")] for group in groups]
    longest = int(np.argmax([lengths[group[0]] for group in groups]))
    groups.insert(0, groups.pop(longest))
    return torch.from_numpy(np.concatenate(groups))


def epoch_length(length: int, layout: Layout, drop_last: bool) -> int:
    """Samples of an epoch that are trained on; `drop_last` leaves out the last row of batches where it is not full."""
    return length - length % layout.global_micro_batch_size if drop_last else length


def parts(position: int, stop: int, passed_over: Sequence[tuple[int, int]] = ()) -> list[tuple[int, int]]:
    """What is trained on between two positions of an epoch, as (start, stop) in order; none is empty.

    Args:
        position: The first position.
        stop: The position after the last one.
        passed_over: Ranges (start, stop) of the epoch that are left out.
    """
    found = []
    for start, end in sorted(passed_over):
        if position < min(start, stop):
            found.append((position, min(start, stop)))
        position = max(position, end)
    return [*found, (position, stop)] if position < stop else found


def ranges(passed_over: Sequence[tuple[int, int, int]], epoch: int) -> list[tuple[int, int]]:
    """(start, stop) of those (epoch, start, stop) that are of this epoch."""
    return [(start, stop) for number, start, stop in passed_over if number == epoch]


def steps_between(position: int, stop: int, layout: Layout, passed_over: Sequence[tuple[int, int]] = ()) -> int:
    """Optimizer steps between two positions of an epoch."""
    return sum(-(-(last - first) // layout.global_batch_size) for first, last in parts(position, stop, passed_over))


def slots(
    order: torch.Tensor, epoch: int, position: int, layout: Layout, passed_over: Sequence[tuple[int, int]] = ()
) -> Iterator[BatchIndices]:
    """This process's micro-batches of an epoch from `position` on; `order` is the epoch's (cut to what is used)."""
    kept = parts(position, len(order), passed_over)
    for first, stop in _windows(kept, layout):
        pieces = [
            piece for row in range(first, stop, layout.global_micro_batch_size) for piece in _pieces(row, stop, layout)
        ]
        for number, piece in enumerate(pieces):
            # A stand-in is of the step's first samples.
            begin, end = piece or (first, min(first + min(layout.at_once, _STAND_IN), stop))
            yield BatchIndices(
                epoch=epoch,
                start=begin,
                indices=order[begin:end].tolist(),
                is_dummy=piece is None,
                micro_batch_index=number,
                is_last=number == len(pieces) - 1,
                window_start=first,
                window_stop=stop,
                closes_epoch=stop == kept[-1][1],
            )


def _pieces(row: int, stop: int, layout: Layout) -> list[tuple[int, int] | None]:
    """(start, stop) of what this process computes of a row; None where it has none while others have."""
    start = row + layout.rank * layout.batch_size
    own = layout.cut(start, min(start + layout.batch_size, stop)) if start < stop else []
    return [*own, *[None] * (layout.parts(min(layout.batch_size, stop - row)) - len(own))]


def _windows(kept: list[tuple[int, int]], layout: Layout) -> Iterator[tuple[int, int]]:
    """(start, stop) of each optimizer step; one that would run into what is passed over is cut there."""
    for first, last in kept:
        for start in range(first, last, layout.global_batch_size):
            yield start, min(start + layout.global_batch_size, last)


def evaluation_slots(length: int, layout: Layout) -> Iterator[BatchIndices]:
    """This process's batches of an evaluation, in the dataset's order; some processes may have one less than others."""
    single = layout._replace(accumulation=1)
    return (slot for slot in slots(torch.arange(length), -1, 0, single) if not slot.is_dummy)
