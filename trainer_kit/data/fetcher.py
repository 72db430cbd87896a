"""`Fetcher`: reads samples so that their randomness depends on (seed, epoch, sample) only, in any process."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence
from functools import partial
from typing import Any

from torch.utils.data import Dataset

from trainer_kit.data.collate import Collator
from trainer_kit.data.joint_collation import collate_together
from trainer_kit.data.own_generators import OwnGenerators
from trainer_kit.data.sampling import BatchIndices, mix
from trainer_kit.errors import DataError
from trainer_kit.utils.rng import read_watched, seed_generators

_SAMPLE, _COLLATE = 1, 2
"""Keep the seeds of samples and of collation apart, and apart from those of the steps."""


class Fetcher(Dataset[Any]):
    """Fetch and collate the samples of a batch.

    Every sample's randomness (torch, numpy, random) is seeded from (seed, epoch, dataset index), and for a sample that
    the epoch has had before also from how often. Seeding before each sample costs more than reading a small one, so
    this stops where the samples of the first batch draw nothing: the first sample's seed is that of the whole batch
    then. If a generator changes later, the batch is read again with a seed per sample, and so are all later ones.
    Generators that the dataset or the collator keep for themselves are seeded with the global ones.

    Args:
        dataset: A map-style dataset.
        collate: Makes a batch from a list of samples.
        seed: The run's seed.
    """

    def __init__(self, dataset: Any, collate: Collator, seed: int) -> None:
        self.dataset = dataset
        self.collate = collate
        self.seed = seed
        self.draws: bool | None = None  # not known before the first batch
        self.epoch: int | None = None
        self._own_generators = OwnGenerators(dataset, collate)
        self._reads_many = _reads_many(type(dataset))

    def __getitem__(self, slot: BatchIndices) -> tuple[BatchIndices, Any]:
        if slot.epoch == self.epoch:
            return slot, self._read(slot)
        self.epoch = slot.epoch
        set_epoch(self.dataset, slot.epoch)
        self._own_generators.find()  # `set_epoch` may have made new ones
        batch = self._read(slot)
        if self._own_generators.find():  # and so may the first draw
            batch = self._read(slot)
        return slot, batch

    def several(self, slots: Sequence[BatchIndices]) -> list[tuple[BatchIndices, Any]]:
        """Fetch the batches of an evaluation, by one reading if there are several and none draws.

        The collator is one that stacks, see `batches_at_once`.
        """
        if slots and self.draws is None and not self._own_generators:
            return [self[slots[0]], *self.several(slots[1:])]
        if len(slots) > 1 and not (self.draws or self._own_generators):
            seed_generators(self._start(slots[0]))
            batches, self.draws = read_watched(
                lambda: collate_together(self.collate, [self._samples(slot.indices) for slot in slots])
            )
            if batches is not None and not self.draws:
                return [*zip(slots, batches, strict=True)]
        return [self[slot] for slot in slots]

    def _read(self, slot: BatchIndices) -> Any:
        if not (self.draws or self._own_generators):
            if self.draws is None and not self._reads_many:
                return self._read_first(slot)
            seed_generators(self._start(slot))
            batch, self.draws = read_watched(lambda: self.collate(self._samples(slot.indices)))
            if not self.draws:
                return batch
        return self._collated(slot, self._seeded(slot, _numbered(slot)))

    def _read_first(self, slot: BatchIndices) -> Any:
        """Read the first batch; its first sample is read once, whether it draws or not.

        A dataset that gives from a buffer would lose what is read in vain.
        """
        (first, *others), start = _numbered(slot), self._start(slot)
        seed_generators(start)
        samples, self.draws = read_watched(partial(self._one_by_one, slot.indices[:1]))
        if samples is None or (self.draws and start != self._seed_of(_SAMPLE, slot.epoch, *first)):
            samples = self._seeded(slot, [first])
        if not self.draws:
            rest, self.draws = read_watched(partial(self._one_by_one, slot.indices[1:]))
            samples += [] if rest is None or self.draws else rest
        if self.draws:
            return self._collated(slot, [*samples, *self._seeded(slot, others)])
        batch, self.draws = read_watched(partial(self.collate, samples))
        return self._read(slot) if self.draws else batch

    def _seeded(self, slot: BatchIndices, numbered: Sequence[tuple[int, int]]) -> list[Any]:
        """Read some samples of a batch, each with its own seed."""
        samples = []
        for index, repeat in numbered:
            self._seed(self._seed_of(_SAMPLE, slot.epoch, index, repeat))
            samples += self._one_by_one([index])
        return samples

    def _collated(self, slot: BatchIndices, samples: list[Any]) -> Any:
        self._seed(self._seed_of(_COLLATE, slot.epoch, *_numbered(slot)[0]))
        return self.collate(samples)

    def _start(self, slot: BatchIndices) -> int:
        """Return the seed of a batch that draws nothing; one for a whole evaluation, whose batches may be joined."""
        if slot.epoch < 0:
            return self._seed_of(_SAMPLE, slot.epoch, 0, 0)
        return self._seed_of(_SAMPLE, slot.epoch, slot.indices[0], slot.repeats[0] if slot.repeats else 0)

    def _seed_of(self, kind: int, epoch: int, index: int, repeat: int) -> int:
        return mix(self.seed, epoch, index, kind, *([repeat] if repeat else ()))

    def _seed(self, value: int) -> None:
        seed_generators(value)
        self._own_generators.seed(value)

    def _samples(self, indices: list[int]) -> list[Any]:
        """Read all samples in one call if the dataset has `__getitems__`, as Hugging Face's datasets do."""
        if self._reads_many:
            with contextlib.suppress(Exception):  # reading one by one names the failing sample
                samples: list[Any] = self.dataset.__getitems__(indices)
                return samples
        return self._one_by_one(indices)

    def _one_by_one(self, indices: list[int]) -> list[Any]:
        dataset, index = self.dataset, -1
        try:
            return [dataset[index := each] for each in indices]
        except Exception as error:
            raise DataError(f"the dataset raised at index {index}: {type(error).__name__}: {error}") from error


def _numbered(slot: BatchIndices) -> list[tuple[int, int]]:
    """Return the index of each sample, and how often the epoch has had it before."""
    return [*zip(slot.indices, slot.repeats or itertools.repeat(0), strict=False)]


def _reads_many(kind: type) -> bool:
    """Return whether a dataset has `__getitems__` and no subclass overrides `__getitem__`, which would be bypassed."""
    nearest = next((cls for cls in kind.__mro__ if {"__getitem__", "__getitems__"} & vars(cls).keys()), object)
    return "__getitems__" in vars(nearest)


def set_epoch(dataset: Any, epoch: int) -> None:
    """Call the dataset's `set_epoch`, if it has one; do nothing for an evaluation (epoch -1)."""
    if epoch >= 0 and hasattr(dataset, "set_epoch"):
        dataset.set_epoch(epoch)
