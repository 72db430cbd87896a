"""Micro-batches of map-style datasets: fetched in order, counted by step, resumable at any position."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from trainer_kit.data.collate import Collator
from trainer_kit.data.fetcher import Fetcher
from trainer_kit.data.joint_collation import batches_at_once
from trainer_kit.data.sampling import (
    BatchIndices,
    Layout,
    epoch_length,
    evaluation_slots,
    mix,
    permutation,
    ranges,
    slots,
    steps_between,
)
from trainer_kit.data.workers import worker_init, worker_items
from trainer_kit.loss.batch import Counts, count
from trainer_kit.utils.rng import seed_generators
from trainer_kit.utils.units import join_names

_QUICK = 0.002
"""Longest reading (s) after which more batches are read at once, since a signal to stop waits for it."""


@dataclasses.dataclass(slots=True, eq=False)
class GlobalBatch:
    """The micro-batches of one optimizer step, counted before the first forward pass.

    The loader counts this process's micro-batches. The loop then sets the sums over all processes (`set_numbers`).

    Attributes:
        epoch: Number of the epoch, from 0.
        start: Position in the epoch where this step begins, in samples over all processes.
        stop: Position in the epoch after this step.
        closes_epoch: Whether this step is the epoch's last.
        samples: Samples of the step.
        tokens: Tokens of the step, without padding.
        labels: Items of the step (see `loss.batch.Counts`).
        shifted: Items of the step for a model that shifts its labels.
        data_state: State from which an iterable dataset or a sampler resumes after this step; None without one.
        fingerprint: Digest of what this process has read, below 2**40, if all processes must read the same; else 0.
        may_differ: Whether another fingerprint is a warning only: random changes of samples may differ.
    """

    epoch: int
    start: int
    stop: int
    closes_epoch: bool
    samples: int = 0
    tokens: int = 0
    labels: Any = 0
    shifted: Any = 0
    data_state: dict[str, Any] | None = None
    fingerprint: int = 0
    may_differ: bool = False

    def add(self, counts: Counts) -> None:
        self.samples += counts.samples
        self.tokens += counts.tokens
        self.labels += counts.labels
        self.shifted += counts.shifted

    def numbers(self) -> tuple[int, int, int, int]:
        """Return the samples, tokens, labels and shifted labels counted on the host; 0 for counts on a device."""
        labels = self.labels if isinstance(self.labels, int) else 0
        return self.samples, self.tokens, labels, self.shifted if isinstance(self.shifted, int) else 0

    def set_numbers(self, sums: Sequence[int], reduce: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Set the counts to those of all processes.

        Args:
            sums: The sums of `numbers()` over all processes.
            reduce: Sums a count on a device over all processes.
        """
        self.samples, self.tokens = sums[:2]
        self.labels = sums[2] if isinstance(self.labels, int) else reduce(self.labels)
        self.shifted = sums[3] if isinstance(self.shifted, int) else reduce(self.shifted)


@dataclasses.dataclass(slots=True, eq=False)
class MicroBatch:
    """The batch of one forward and backward pass.

    Attributes:
        batch: The batch from the collator.
        counts: Counts of the batch; all 0 for a dummy batch of a process without samples left in the step.
        global_batch: The global batch it belongs to.
        index: Its number in the step, from 0.
        is_last: Whether it is the step's last.
        start: Position of its first sample in the epoch.
        indices: Dataset indices of its samples; empty for iterable datasets.
        samples: Number of samples collated, also for a dummy batch.
        unfilled: The batch before samples were added for a static shape; None if none were added.
    """

    batch: Any
    counts: Counts
    global_batch: GlobalBatch
    index: int
    is_last: bool
    start: int
    indices: list[int]
    samples: int
    unfilled: Any = None


@dataclasses.dataclass(frozen=True)
class LoaderConfig:
    """The configuration of reading samples.

    Attributes:
        collate: Makes a batch from a list of samples.
        seed: The run's seed.
        workers: Number of worker processes; 0 reads in this process.
        pin_memory: Whether workers' batches are copied to page-locked memory.
        timeout: Seconds that workers may take for a batch; 0: no limit.
        worker_init_fn: Called in each worker with its number; None: nothing.
        prefetch_factor: Batches that each worker reads ahead; None: torch's default.
        multiprocessing_context: Start method of the workers, or a context of multiprocessing; None: torch's default.
    """

    collate: Collator
    seed: int
    workers: int = 0
    pin_memory: bool = False
    timeout: float = 0.0
    worker_init_fn: Callable[[int], Any] | None = None
    prefetch_factor: int | None = None
    multiprocessing_context: Any = None


class TrainLoader:
    """The training batches of a map-style dataset.

    Args:
        dataset: A dataset with `__len__` and `__getitem__`.
        layout: Batch size, accumulation and processes.
        reading: Collation, seed and workers.
        drop_last: Whether to drop an epoch's last batches if not every process has a full one.
        grouped_column: Column whose length in each sample puts samples of similar length into one batch, see
            `sample_lengths`; None: no grouping.
        shuffle: Whether to shuffle the samples of each epoch; otherwise they come in the dataset's order.
        samples: Samples of an epoch; None: those of the dataset.

    Attributes:
        passed_over: Positions to skip, as (epoch, start, stop); set it before `micro_batches`.
        has_equal_epochs: Whether all epochs have as many steps, but for positions to skip.

    Raises:
        ValueError: If an epoch has no batch, or samples lack the column.
    """

    def __init__(
        self,
        dataset: Any,
        layout: Layout,
        reading: LoaderConfig,
        drop_last: bool = False,
        grouped_column: str | None = None,
        shuffle: bool = True,
        samples: int | None = None,
    ) -> None:
        self.has_equal_epochs = True
        self.dataset = dataset
        self.shuffle = shuffle
        self.layout = layout
        self.reading = reading
        self.passed_over: Sequence[tuple[int, int, int]] = ()
        self.lengths = None if grouped_column is None else sample_lengths(dataset, reading.seed, grouped_column)
        samples = len(dataset) if samples is None else samples
        self.epoch_length = epoch_length(samples, layout, drop_last)
        if self.epoch_length == 0:
            raise ValueError(no_batch(samples, layout))

    def length_of(self, epoch: int) -> int:
        """Return the samples of an epoch to train on."""
        return self.epoch_length

    def steps_left(self, epoch: int, position: int) -> int:
        """Return the optimizer steps from a position to the end of an epoch."""
        return steps_between(position, self.epoch_length, self.layout, ranges(self.passed_over, epoch))

    def micro_batches(
        self, epoch: int, position: int, steps: int, data_state: dict[str, Any] | None = None
    ) -> Iterator[MicroBatch]:
        """Yield the micro-batches of the next `steps` steps, starting at `position` in `epoch`.

        Samples before `position` are not read.

        Args:
            epoch: Number of the epoch, from 0.
            position: Samples of the epoch that were trained on.
            steps: Number of optimizer steps.
            data_state: Not used by map-style datasets.
        """
        fetched: list[tuple[BatchIndices, Any]] = []
        for slot, batch in _fetched(self.dataset, self._slots(epoch, position, steps), self.reading):
            fetched.append((slot, batch))
            if slot.is_last:
                yield from _counted(fetched)
                fetched = []

    def resume(self, epoch: int, position: int, data_state: dict[str, Any] | None) -> dict[str, Any] | None:
        """Return what applies of a checkpoint's `GlobalBatch.data_state` to a resume at a position of an epoch."""
        return None

    def state_after(self, epoch: int, data_state: dict[str, Any] | None) -> dict[str, Any] | None:
        """End an epoch; return what a checkpoint between it and the next one holds of `GlobalBatch.data_state`."""
        return None

    def order(self, epoch: int) -> torch.Tensor | range:
        """Return the dataset indices of an epoch in their order."""
        if not self.shuffle:
            return range(self.epoch_length)
        return permutation(len(self.dataset), self.reading.seed, epoch, self.lengths)[: self.epoch_length]

    def slots_of(self, epoch: int, position: int) -> Iterator[BatchIndices]:
        """Yield the indices of this process's micro-batches from a position to the end of an epoch."""
        return slots(self.order(epoch), epoch, position, self.layout, ranges(self.passed_over, epoch))

    def _slots(self, epoch: int, position: int, steps: int) -> Iterator[BatchIndices]:
        while steps > 0:
            # No name holds the order: the one before is freed when the next is made.
            for slot in self.slots_of(epoch, position):
                yield slot
                steps -= slot.is_last
                if steps == 0:
                    return
            epoch, position = epoch + 1, 0


def no_batch(length: int, layout: Layout) -> str:
    """Return the error message for a training dataset of this length without a batch."""
    if length == 0:
        return "train_dataset is empty; give at least one sample"
    return (
        f"dataloader_drop_last=True leaves nothing of {length} samples in batches of "
        f"{layout.global_micro_batch_size}; make them smaller or keep the last one"
    )


def evaluation_batches(
    dataset: Any,
    layout: Layout,
    reading: LoaderConfig,
    plan: Iterable[BatchIndices] | None = None,
    reads_several: bool = False,
) -> Iterator[tuple[Any, Counts, bool]]:
    """Yield this process's batches of an evaluation, with their counts, and whether each is a dummy batch.

    Args:
        dataset: A dataset with `__len__` and `__getitem__`.
        layout: Batch size and processes.
        reading: Collation, seed and workers.
        plan: The indices of the batches; None: in the dataset's order.
        reads_several: Whether small batches may be read several at a time. A device that computes meanwhile would wait.
    """
    plan = iter(plan or evaluation_slots(len(dataset), layout))
    if reads_several and reading.workers == 0:
        fetched = _fetched_together(Fetcher(dataset, reading.collate, reading.seed), plan)
    else:
        fetched = _fetched(dataset, plan, reading)
    for slot, batch in fetched:
        yield batch, count(batch, len(slot.indices)), slot.is_dummy


def _fetched_together(fetcher: Fetcher, plan: Iterator[BatchIndices]) -> Iterator[tuple[BatchIndices, Any]]:
    """Yield the batches of an evaluation; small ones that are quick to read are read several at a time."""
    number, most = 1, 0
    while slots := [*itertools.islice(plan, number)]:
        begin = time.perf_counter()
        fetched = fetcher.several(slots)
        is_quick = time.perf_counter() - begin < _QUICK
        most = most or batches_at_once(fetcher.collate, fetched[0][1], len(slots[0].indices))
        number = min(2 * number, most) if is_quick else max(number // 2, 1)
        while fetched:  # no name holds a batch while the next one is read
            yield fetched.pop(0)


def _counted(fetched: list[tuple[BatchIndices, Any]]) -> Iterator[MicroBatch]:
    """Yield the micro-batches of one step; all are counted first, since each is weighted by its share of the step."""
    slot = fetched[-1][0]
    window = GlobalBatch(slot.epoch, slot.window_start, slot.window_stop, slot.closes_epoch)
    all_counts = [_counts(slot, batch) for slot, batch in fetched]
    for counts in all_counts:
        window.add(counts)
    for (slot, batch), counts in zip(fetched, all_counts, strict=True):
        samples = len(slot.indices)
        yield MicroBatch(batch, counts, window, slot.micro_batch_index, slot.is_last, slot.start, slot.indices, samples)


def _counts(slot: BatchIndices, batch: Any) -> Counts:
    counts = count(batch, len(slot.indices))
    return counts.as_nothing() if slot.is_dummy else counts


def _fetched(dataset: Any, plan: Iterable[BatchIndices], reading: LoaderConfig) -> Iterator[tuple[BatchIndices, Any]]:
    fetcher = Fetcher(dataset, reading.collate, reading.seed)
    if reading.workers == 0:
        return map(fetcher.__getitem__, plan)
    return from_workers(fetcher, reading, plan)


def from_workers(dataset: Any, reading: LoaderConfig, sampler: Iterable[Any] | None = None) -> Iterator[Any]:
    """Return an iterator over the items that DataLoader workers read, without drawing from the global generator.

    The DataLoader has its own generator. Otherwise `iter(DataLoader)` draws from the global one and changes dropout.

    Args:
        dataset: The dataset that workers read, which collates by itself.
        reading: Workers, timeout and seed.
        sampler: Yields the dataset's indices; None for an iterable dataset.

    Raises:
        WorkerError: See `worker_items`.
    """
    loader = DataLoader(
        dataset,
        batch_size=None,
        sampler=sampler,
        num_workers=reading.workers,
        collate_fn=_as_is,
        pin_memory=reading.pin_memory,
        timeout=reading.timeout,
        worker_init_fn=worker_init(reading.worker_init_fn, reading.multiprocessing_context),
        prefetch_factor=reading.prefetch_factor,
        multiprocessing_context=reading.multiprocessing_context,
        generator=torch.Generator().manual_seed(reading.seed),
    )
    return worker_items(loader, "dataloader_timeout")


def _as_is(item: Any) -> Any:
    return item


def sample_lengths(dataset: Any, seed: int = 0, column: str = "input_ids") -> np.ndarray:
    """Return the length of each sample: the dataset's column `length`, else the length of its model input.

    Without the column `length`, every sample is read once. Randomness is seeded from `seed` and the index, so that all
    processes and a resumed run find the same lengths.

    Args:
        dataset: The dataset.
        seed: The run's seed.
        column: Name of the model input.

    Returns:
        The lengths, shape [samples].

    Raises:
        ValueError: If there are no such columns.
    """
    columns = getattr(dataset, "column_names", None)
    if columns is not None and "length" in columns:
        return np.asarray(dataset["length"])
    try:
        return np.array([_length_of(dataset, index, seed, column) for index in range(len(dataset))])
    except (KeyError, TypeError, IndexError) as error:
        sample = dataset[0]
        found = f"columns {join_names([*map(repr, sample)])}" if isinstance(sample, Mapping) else "no columns"
        raise ValueError(
            f"group_by_length=True needs samples that are dicts with {column!r}, whose length counts, or a dataset "
            f"with the column 'length'; the first one has {found}"
        ) from error


def _length_of(dataset: Any, index: int, seed: int, column: str) -> int:
    seed_generators(mix(seed, index))
    return len(dataset[index][column])
