"""The first batches of a training, to look at before it begins."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
import multiprocessing
import os
from collections.abc import Callable, Iterator
from contextlib import closing
from multiprocessing.reduction import ForkingPickler
from typing import Any, TypeVar

from trainer_kit.data.build import make_train_loader
from trainer_kit.data.collate import Collator
from trainer_kit.data.iterable_loader import StreamLoader
from trainer_kit.data.map_loader import LoaderConfig, MicroBatch, TrainLoader
from trainer_kit.errors import ReadOnceError
from trainer_kit.run import Run
from trainer_kit.state import Stateful
from trainer_kit.utils.rng import generators_kept

T = TypeVar("T")


def first_batch(run: Run, reading: LoaderConfig) -> MicroBatch:
    """The first micro-batch from where the run stands; reading it leaves no trace.

    Raises:
        ReadOnceError: If the dataset is an iterator.
        ValueError: If there is no dataset, or an empty one.
        Exception: What the dataset and the collator raise.
    """
    return first_batches(run, make_train_loader(run, reading), 1)[0]


def first_batches(run: Run, loader: TrainLoader | StreamLoader, most: int) -> list[MicroBatch]:
    """The first micro-batches from where the run stands, each as a step of its own; reading them leaves no trace.

    Args:
        run: Where it begins; iterable datasets are read from the beginning of its epoch.
        loader: Its training batches; it stays as it is.
        most: How many.

    Raises:
        ReadOnceError: If the dataset is an iterator.
        Exception: What the dataset and the collator raise.
    """
    if isinstance(run.train_dataset, Iterator):
        raise ReadOnceError(
            "train_dataset can be read only once, and would miss its first batch in training; give a dataset whose "
            "__iter__ starts from the beginning each time"
        )
    single: Any = copy.copy(loader)
    single.layout = loader.layout._replace(accumulation=1)
    position = 0 if isinstance(loader, StreamLoader) else run.state.position

    def read(reading: LoaderConfig) -> list[MicroBatch]:
        single.reading = reading
        with closing(single.micro_batches(run.state.epoch, position, most)) as source:  # it may have workers
            return list(itertools.islice(source, most))

    with generators_kept(run.strategy.device):
        return read_ahead(run.train_dataset, loader.reading, read)


def read_ahead(dataset: Any, reading: LoaderConfig, read: Callable[[LoaderConfig], T]) -> T:
    """Reads something of a dataset before its time.

    That is done by workers where they are forked, whose datasets are copies: what a dataset keeps in itself (a
    generator, a counter) is then as it was before. One that gives and takes its state is read here, and so is one that
    only this process can read, as on a GPU, or whose batches no other process can be given.

    Args:
        dataset: What is read.
        reading: How it is read in training.
        read: Reads it in the way that it is given.

    Raises:
        Exception: What `read` raises.
    """
    reading = dataclasses.replace(reading, pin_memory=False)
    if reading.workers:
        with _positions_kept():
            return read(reading)
    if isinstance(dataset, Stateful):
        kept = copy.deepcopy(dataset.state_dict())
        try:
            return read(reading)
        finally:
            dataset.load_state_dict(kept)
    if _forks():
        with contextlib.suppress(Exception), _positions_kept():
            return read(dataclasses.replace(reading, workers=1, collate=_Portable(reading.collate)))
    return read(reading)


class _Portable:
    """A collator that raises where a worker could not hand over the batch: it would be waited for without end."""

    def __init__(self, collate: Collator) -> None:
        self._collate = collate

    def __call__(self, samples: list[Any]) -> Any:
        batch = self._collate(samples)
        ForkingPickler.dumps(batch)
        return batch


def _forks() -> bool:
    """Whether workers are forked; asking for it settles nothing."""
    method = multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]
    return method == "fork"


@contextlib.contextmanager
def _positions_kept() -> Iterator[None]:
    """Leaves files that are open for reading where they stood: a process and its forks have one position together."""
    if not _forks():
        yield
        return
    import fcntl  # not on Windows

    positions = {}
    for number in map(int, os.listdir("/dev/fd")):
        with contextlib.suppress(OSError):  # no file, or the folder that has just been looked into
            if fcntl.fcntl(number, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
                positions[number] = os.lseek(number, 0, os.SEEK_CUR)
    try:
        yield
    finally:
        for number, position in positions.items():
            with contextlib.suppress(OSError):  # closed meanwhile
                os.lseek(number, position, os.SEEK_SET)
