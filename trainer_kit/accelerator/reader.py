"""Reading of a prepared loader's batches, in this process or in workers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, Dataset

from trainer_kit.accelerator.concat import joined, row_count
from trainer_kit.data.fetcher import set_epoch
from trainer_kit.data.own_generators import OwnGenerators
from trainer_kit.data.workers import worker_items
from trainer_kit.utils.rng import KeptGenerators, seed_generators


class BatchRequest(NamedTuple):
    """A batch that this process must read.

    Attributes:
        epoch: Number of the pass.
        seed: Seed of the randomness in reading.
        indices: Indices from the sampler.
        real: How many of `indices` are not repeats.
        last: Whether the batch is the last of its pass.
    """

    epoch: int
    seed: int
    indices: list[Any]
    real: int
    last: bool


@dataclasses.dataclass(slots=True)
class Dealt:
    """A batch after reading: its rows, how many of them are not repeats, and `BatchRequest.last`."""

    rows: int
    real: int
    last: bool
    batch: Any


class Reader(Dataset[Any]):
    """Dataset that reads and collates batch requests, each with its own randomness, in any process.

    Args:
        loader: The user's DataLoader.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.dataset: Any = loader.dataset
        self.collate = loader.collate_fn
        self.in_batches = loader.batch_sampler is not None
        self.epoch: int | None = None
        self._own_generators = OwnGenerators(self.dataset, self.collate)

    def read_apart(self, job: BatchRequest, device: torch.device) -> tuple[int, int, bool, Any]:
        """Read a request, and leave the generators of the host and of `device` as they are."""
        states = KeptGenerators(device)
        try:
            return self._read(job) if job.epoch == self.epoch else self[job]
        finally:
            states.restore()

    def __getitem__(self, job: BatchRequest) -> tuple[int, int, bool, Any]:
        if job.epoch == self.epoch:
            return self._read(job)
        self.epoch = job.epoch
        set_epoch(self.dataset, job.epoch)
        self._own_generators.find()  # `set_epoch` may have made new ones
        dealt = self._read(job)
        if self._own_generators.find():  # and so may the first draw
            dealt = self._read(job)
        return dealt

    def _read(self, job: BatchRequest) -> tuple[int, int, bool, Any]:
        seed_generators(job.seed)
        self._own_generators.seed(job.seed)
        return self._collated(job)

    def _collated(self, job: BatchRequest) -> tuple[int, int, bool, Any]:
        if self.in_batches:
            return len(job.indices), job.real, job.last, self.collate(self._samples(job.indices))
        batches = [self.collate(self.dataset[index]) for index in job.indices]
        rows = [row_count(batch) for batch in batches]
        return sum(rows), sum(rows[: job.real]), job.last, joined(batches)

    def _samples(self, indices: list[Any]) -> Any:
        if getattr(self.dataset, "__getitems__", None):
            return self.dataset.__getitems__(indices)
        return [self.dataset[index] for index in indices]


class WorkerReader:
    """Workers that read batch requests, with the settings of the user's DataLoader.

    Args:
        loader: The user's DataLoader.
        pins_memory: Whether the device copies from page-locked memory.
    """

    def __init__(self, loader: DataLoader[Any], pins_memory: bool) -> None:
        self._requests = _Requests()
        self._loader = DataLoader(
            Reader(loader),
            batch_size=None,
            sampler=self._requests,
            collate_fn=_as_is,
            num_workers=loader.num_workers,
            pin_memory=loader.pin_memory and pins_memory,
            timeout=loader.timeout,
            worker_init_fn=loader.worker_init_fn,
            multiprocessing_context=loader.multiprocessing_context,
            generator=torch.Generator(),  # otherwise the DataLoader draws from the global one
            prefetch_factor=loader.prefetch_factor,
            persistent_workers=loader.persistent_workers,
        )

    def read(self, requests: Iterator[BatchRequest]) -> Iterator[Any]:
        """Return an iterator over the requested batches."""
        self._requests.current = requests
        return worker_items(self._loader)


class _Requests:
    """Sampler of the workers' requests, replaced for each pass."""

    def __init__(self) -> None:
        self.current: Iterator[BatchRequest] = iter(())

    def __iter__(self) -> Iterator[BatchRequest]:
        return self.current


class CountingCollator:
    """A collator that also returns the number of samples: a batch's first dimension may be nodes or channels."""

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self._collate = collate

    def __call__(self, samples: list[Any]) -> tuple[int, Any]:
        return len(samples), self._collate(samples)


def _as_is(item: Any) -> Any:
    return item
