"""The order of samples, a pure function of (seed, epoch, position), and their distribution over processes and steps.

The order of an epoch is a permutation of the dataset that does not depend on batch size, accumulation or number of
processes. An optimizer step takes the next `Layout.global_batch_size` samples of it. A position counts samples over all
processes. A resume is therefore arithmetic, also under another layout. If only the number of processes is another one,
a step may keep its samples: `kept_layout` gives a layout that deals them evenly.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

_MASK = 0xFFFFFFFFFFFFFFFF
STAND_IN = 2
"""Samples of a dummy batch: batch norm refuses a single one."""

GROUP = 1024
"""Samples that `group_by_length` sorts together: a constant, so that the order does not depend on the layout."""


class Layout(NamedTuple):
    """The distribution of a step's samples over processes and micro-batches.

    Attributes:
        batch_size: Samples of one micro-batch on one process.
        accumulation: Micro-batches of one step on one process.
        readers: Number of processes that read samples of their own.
        reader: Number of this process among these, from 0.
        limit: Maximal samples of one pass; larger micro-batches are cut into parts, each of which the loop takes as a
            micro-batch. The samples of a step do not depend on it. None: no limit.
        ready_size: Samples of a ready batch, which counts as 1 in `batch_size`; None: batches are collated.
        devices: Devices of one process, which share a micro-batch.
        has_own_batches: Whether the data comes in batches of its own, which a process takes as they are.
        full: The layout whose steps this one keeps, with another number of processes or devices. A step's samples are
            dealt evenly, in micro-batches of at most `batch_size`. None: the steps are those of this layout.
    """

    batch_size: int
    accumulation: int = 1
    readers: int = 1
    reader: int = 0
    limit: int | None = None
    ready_size: int | None = None
    devices: int = 1
    has_own_batches: bool = False
    full: Layout | None = None

    @property
    def steps(self) -> Layout:
        """The layout that the steps of the run have: `full`, or this one."""
        return self.full or self

    @property
    def deals_samples(self) -> bool:
        """Whether a step's samples are dealt evenly, rather than in batches."""
        return self.full is not None and not self.has_own_batches

    @property
    def pass_size(self) -> int:
        """Samples of a whole micro-batch on one process."""
        return self._even(self.batch_size) if self.ready_size is None else self.ready_size

    @property
    def padded_size(self) -> int:
        """Samples of a whole micro-batch with static shapes, which all devices share evenly."""
        return -(-self._even(self.batch_size) // self.devices) * self.devices if self.deals_samples else self.batch_size

    @property
    def global_micro_batch_size(self) -> int:
        """Samples of one micro-batch over all processes."""
        return self.steps.batch_size * self.steps.readers

    @property
    def global_batch_size(self) -> int:
        """Samples of one optimizer step over all processes."""
        return self.global_micro_batch_size * self.accumulation

    @property
    def batches(self) -> int:
        """Batches of one optimizer step over all processes."""
        return self.steps.readers * self.accumulation

    @property
    def passes(self) -> int:
        """Passes of a whole step on one process."""
        if self.deals_samples:
            return self.rounds(self.global_batch_size)
        return -(-self.batches // self.readers) * self.parts(self.pass_size)

    @property
    def at_once(self) -> int:
        """Maximal samples that a process computes in one pass."""
        return self.pass_size if self.limit is None else self._even(min(self.pass_size, self.limit))

    @property
    def shares(self) -> list[int]:
        """Samples that each device has of a whole step, or batches if the data comes in batches of its own."""
        whole = self.batches if self.has_own_batches else self.global_batch_size
        parts = self.readers * self.devices
        return [stop - start for start, stop in (part_of(0, whole, number, parts) for number in range(parts))]

    def keep_steps_of(self, readers: int, devices: int) -> Layout:
        """Return a layout with the steps of another number of processes, or of devices of one process."""
        if (readers, devices) == (self.readers, self.devices):
            return self._replace(full=None)
        size = self.batch_size // self.devices * devices
        return self._replace(full=self._replace(batch_size=size, readers=readers, reader=0, devices=devices, full=None))

    def _even(self, most: int) -> int:
        """Return the largest micro-batch of a step that is cut evenly into the fewest of at most `most` samples."""
        if not self.deals_samples:
            return most
        samples = -(-self.global_batch_size // self.readers)
        return -(-samples // -(-samples // most))

    def parts(self, samples: int) -> int:
        """Return the number of parts of a micro-batch of `samples` samples."""
        return 1 if self.limit is None else -(-samples // self.limit)

    def cut(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Cut a micro-batch into the fewest parts, of nearly equal size, and return (start, stop) of each part."""
        parts = self.parts(stop - start)
        return [part_of(start, stop, number, parts) for number in range(parts)]

    def rounds(self, samples: int) -> int:
        """Return the micro-batches that each process takes of a step of `samples` samples that are dealt evenly."""
        return -(-samples // (self.readers * self.at_once))

    def deal(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Deal out a step's samples evenly; return (start, stop) of each micro-batch of this process.

        The micro-batches of all processes follow one another, so that those taken at the same time are neighbors, and
        of similar length with `group_by_length`.
        """
        rounds = self.rounds(stop - start)
        own = range(self.reader, rounds * self.readers, self.readers)
        return [part_of(start, stop, number, rounds * self.readers) for number in own]


class BatchIndices(NamedTuple):
    """The dataset indices of one micro-batch of one process, and its place in the step.

    Attributes:
        epoch: Number of the epoch, from 0.
        start: Position of its first sample in the epoch's order.
        indices: Dataset indices of the samples.
        is_dummy: Whether it is a dummy batch of weight zero, for a process without samples left in the step.
        micro_batch_index: Number of the micro-batch in the step, from 0.
        is_last: Whether it is the step's last.
        window_start: Position in the epoch where this step begins.
        window_stop: Position in the epoch after this step.
        closes_epoch: Whether this step is the epoch's last.
        repeats: How often the epoch's order has had each sample before; None: it has none twice.
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
    repeats: list[int] | None = None


def part_of(start: int, stop: int, number: int, parts: int) -> tuple[int, int]:
    """Return (start, stop) of one of the parts of a range, whose sizes differ by at most one; the first are larger."""
    least, more = divmod(stop - start, parts)
    begin = start + number * least + min(number, more)
    return begin, begin + least + (number < more)


def saved_layout(saved: Mapping[str, Any], present: Layout) -> Layout:
    """Return the layout in a checkpoint.

    Args:
        saved: `RunLength.state_dict()` in the checkpoint.
        present: The layout of the present processes.
    """
    processes, devices = saved["processes"], saved.get("devices", present.devices)  # earlier versions wrote less
    layout = Layout(saved["batch_size"], saved["accumulation"], processes, devices=devices)
    layout = layout._replace(has_own_batches=present.has_own_batches)
    return layout.keep_steps_of(saved.get("full_processes", processes), saved.get("full_devices", devices))


def kept_layout(layout: Layout, saved: Mapping[str, Any] | None) -> Layout:
    """Return a layout that keeps the steps of a checkpoint, if only the number of processes or devices is another one.

    Args:
        layout: The layout of the present processes.
        saved: `RunLength.state_dict()` in the checkpoint; None: without one.
    """
    if saved is None:
        return layout
    before = saved_layout(saved, layout)
    samples = [each.batch_size // each.devices * each.accumulation for each in (layout, before)]
    if samples[0] != samples[1]:
        return layout
    return layout.keep_steps_of(before.steps.readers, before.steps.devices)


def mix(*numbers: int) -> int:
    """Hash integers to a number below 2**63, by the finalizer of splitmix64 (Steele et al. 2014)."""
    state = 0
    for number in numbers:
        state = (state + number + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state >> 1


def is_small(length: int) -> bool:
    """Return whether a dataset is too small for four groups of `GROUP` samples."""
    return length < 4 * GROUP


def permutation(length: int, seed: int, epoch: int, lengths: np.ndarray | None = None) -> torch.Tensor:
    """Return the order of one epoch.

    Args:
        length: Samples in the dataset.
        seed: The run's seed.
        epoch: Number of the epoch, from 0.
        lengths: Length of each sample, shape [length], to place samples of similar length together. The permutation is
            cut into groups of `GROUP`, or into four if that is fewer samples each, as transformers' `group_by_length`
            does. Each is sorted from long to short. The longest sample comes first, so that an out-of-memory error
            appears in the first step. None: no grouping.

    Returns:
        Dataset indices, shape [length]: int32 if they fit, which holds the same order in half the memory; else int64.
    """
    generator = torch.Generator().manual_seed(mix(seed, epoch))
    order = torch.randperm(length, generator=generator, dtype=torch.int32 if length < 2**31 else torch.int64)
    if lengths is None or length == 0:
        return order
    shuffled = order.numpy()
    size = -(-length // 4) if is_small(length) else GROUP
    groups = [shuffled[start : start + size] for start in range(0, length, size)]
    groups = [group[np.argsort(-lengths[group], kind="stable")] for group in groups]
    longest = int(np.argmax([lengths[group[0]] for group in groups]))
    groups.insert(0, groups.pop(longest))
    return torch.from_numpy(np.concatenate(groups))


def epoch_length(length: int, layout: Layout, drop_last: bool) -> int:
    """Return the samples of an epoch to train on; `drop_last` drops the last batches unless all processes' are full."""
    return length - length % layout.global_micro_batch_size if drop_last else length


def parts(position: int, stop: int, passed_over: Sequence[tuple[int, int]] = ()) -> list[tuple[int, int]]:
    """Return the ranges to train on between two positions of an epoch, as non-empty (start, stop) in order.

    Args:
        position: The first position.
        stop: The position after the last one.
        passed_over: Ranges (start, stop) of the epoch to skip.
    """
    found = []
    for start, end in sorted(passed_over):
        if position < min(start, stop):
            found.append((position, min(start, stop)))
        position = max(position, end)
    return [*found, (position, stop)] if position < stop else found


def ranges(passed_over: Sequence[tuple[int, int, int]], epoch: int) -> list[tuple[int, int]]:
    """Return the skipped ranges of one epoch as (start, stop), from ranges (epoch, start, stop)."""
    return [(start, stop) for number, start, stop in passed_over if number == epoch]


def steps_between(position: int, stop: int, layout: Layout, passed_over: Sequence[tuple[int, int]] = ()) -> int:
    """Return the optimizer steps between two positions of an epoch, without skipped ranges."""
    return sum(-(-(last - first) // layout.global_batch_size) for first, last in parts(position, stop, passed_over))


def slots(
    order: torch.Tensor | range,
    epoch: int,
    position: int,
    layout: Layout,
    passed_over: Sequence[tuple[int, int]] = (),
) -> Iterator[BatchIndices]:
    """Yield the indices of this process's micro-batches of an epoch.

    Args:
        order: The order of the epoch, cut to the samples in use; a range for the dataset's order.
        epoch: Number of the epoch, from 0.
        position: Position in the epoch to start at.
        layout: Batch size, accumulation and processes.
        passed_over: Ranges (start, stop) of the epoch to skip.
    """
    kept, size = parts(position, len(order), passed_over), layout.global_micro_batch_size
    taken = order if isinstance(order, range) else order.numpy()  # slices of it are far quicker than a tensor's
    for first, stop in _windows(kept, layout.global_batch_size):
        if layout.deals_samples:
            pieces = [(start, end) if start < end else None for start, end in layout.deal(first, stop)]
        else:
            pieces = [piece for row in range(first, stop, size) for piece in _pieces(row, stop, layout)]
        last, closes_epoch = len(pieces) - 1, stop == kept[-1][1]
        for number, piece in enumerate(pieces):
            # A dummy batch has the step's first samples.
            begin, end = piece or (first, min(first + min(layout.at_once, STAND_IN), stop))
            part = taken[begin:end]
            indices = list(part) if isinstance(part, range) else part.tolist()
            yield BatchIndices(epoch, begin, indices, piece is None, number, number == last, first, stop, closes_epoch)


def _pieces(row: int, stop: int, layout: Layout) -> list[tuple[int, int] | None]:
    """Return (start, stop) of this process's parts of a row of batches; None where only other processes have one."""
    start = row + layout.reader * layout.batch_size
    if layout.limit is None:
        return [(start, min(start + layout.batch_size, stop)) if start < stop else None]
    own = layout.cut(start, min(start + layout.batch_size, stop)) if start < stop else []
    return [*own, *[None] * (layout.parts(min(layout.batch_size, stop - row)) - len(own))]


def _windows(kept: list[tuple[int, int]], size: int) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) of each optimizer step of `size` samples; a skipped range ends a step."""
    for first, last in kept:
        for start in range(first, last, size):
            yield start, min(start + size, last)


def evaluation_slots(length: int, layout: Layout, order: torch.Tensor | None = None) -> Iterator[BatchIndices]:
    """Yield this process's batches of an evaluation, with a dummy batch where only others have one in the last round.

    Args:
        length: Samples in the dataset.
        layout: Batch size and processes.
        order: Dataset indices in their order; None: the dataset's order.
    """
    single = layout._replace(accumulation=1)
    return slots(range(length) if order is None else order, -1, 0, single)
