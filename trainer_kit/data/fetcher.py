"""`Fetcher`: reads samples so that their randomness depends on (seed, epoch, sample) only, in any process."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

from torch.utils.data import Dataset

from trainer_kit.data.collate import Collator
from trainer_kit.data.joint_collation import collate_together
from trainer_kit.data.own_generators import OwnGenerators
from trainer_kit.data.sampling import BatchIndices, mix
from trainer_kit.errors import DataError
from trainer_kit.utils.rng import seed_generators, try_without_draws

_SAMPLE, _COLLATE, _FIRST = 1, 2, 3
"""Keep the seeds of samples, of collation and of first readings apart, and apart from those of the steps."""


class Fetcher(Dataset[Any]):
    """Fetch and collate the samples of a batch.

    Every sample's randomness (torch, numpy, random) is seeded from (seed, epoch, dataset index), and for a sample that
    the epoch has had before also from how often. Seeding before each sample costs more than reading a small one, so a
    batch is first read with one seed (see `try_without_draws`). If that changes a generator, the batch is read again
    with a seed per sample, and so are all later batches. Generators that the dataset or the collator keep for
    themselves are seeded with the global ones.

    Args:
        dataset: A map-style dataset.
        collate: Makes a batch from a list of samples.
        seed: The run's seed.
    """

    def __init__(self, dataset: Any, collate: Collator, seed: int) -> None:
        self.dataset = dataset
        self.collate = collate
        self.seed = seed
        self.draws = False
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
        if len(slots) > 1 and not (self.draws or self._own_generators):
            read = try_without_draws(
                lambda: collate_together(self.collate, [self._samples(slot.indices) for slot in slots]),
                self._first_seed(slots[0]),
            )
            if read is not None:
                return [*zip(slots, read[0], strict=True)]
            self.draws = True
        return [self[slot] for slot in slots]

    def _read(self, slot: BatchIndices) -> Any:
        if not (self.draws or self._own_generators):
            read = try_without_draws(lambda: self.collate(self._samples(slot.indices)), self._first_seed(slot))
            if read is not None:
                return read[0]
            self.draws = True
        samples, repeats = [], slot.repeats or [0] * len(slot.indices)
        for index, repeat in zip(slot.indices, repeats, strict=True):
            self._seed(slot.epoch, index, _SAMPLE, repeat)
            samples += self._one_by_one([index])
        self._seed(slot.epoch, slot.indices[0], _COLLATE, repeats[0])
        return self.collate(samples)

    def _first_seed(self, slot: BatchIndices) -> int:
        """Return the seed of a first reading, which is the same in a whole evaluation, whose batches may be joined."""
        return mix(self.seed, slot.epoch, slot.indices[0] if slot.epoch >= 0 else 0, _FIRST)

    def _seed(self, epoch: int, index: int, kind: int, repeat: int) -> None:
        value = mix(self.seed, epoch, index, kind, *([repeat] if repeat else ()))
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


def _reads_many(kind: type) -> bool:
    """Return whether a dataset has `__getitems__` and no subclass overrides `__getitem__`, which would be bypassed."""
    nearest = next((cls for cls in kind.__mro__ if {"__getitem__", "__getitems__"} & vars(cls).keys()), object)
    return "__getitems__" in vars(nearest)


def set_epoch(dataset: Any, epoch: int) -> None:
    """Call the dataset's `set_epoch`, if it has one; do nothing for an evaluation (epoch -1)."""
    if epoch >= 0 and hasattr(dataset, "set_epoch"):
        dataset.set_epoch(epoch)
