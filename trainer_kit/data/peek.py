"""Reading the first batches of a training before it begins, without side effects."""

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
from trainer_kit.data.source import data_source
from trainer_kit.errors import ReadOnceError
from trainer_kit.run import Run
from trainer_kit.state import is_stateful
from trainer_kit.utils.rng import generators_kept

T = TypeVar("T")


def first_batch(run: Run, reading: LoaderConfig) -> MicroBatch:
    """Return the first micro-batch at the run's position, without side effects on the training.

    Raises:
        ReadOnceError: If the dataset is an iterator.
        ValueError: If there is no dataset, or the dataset is empty.
        Exception: Any error of the dataset or the collator.
    """
    return first_batches(run, make_train_loader(run, reading, trains=False), 1)[0]


def first_batches(run: Run, loader: TrainLoader | StreamLoader, most: int) -> list[MicroBatch]:
    """Return the first micro-batches at the run's position, each as a step of its own, without side effects.

    Args:
        run: The run. Iterable datasets are read from the beginning of its epoch, not from its position.
        loader: The loader of the training batches; it is not changed.
        most: Maximal number of micro-batches.

    Raises:
        ReadOnceError: If the dataset is an iterator.
        Exception: Any error of the dataset or the collator.
    """
    if data_source("train_dataset", run.train_dataset).is_read_once:
        raise ReadOnceError(
            "train_dataset can be read only once, and would miss its first batch in training; give a dataset whose "
            "__iter__ starts from the beginning each time"
        )
    single: Any = copy.copy(loader)
    single.layout = loader.layout._replace(accumulation=1, full=None)
    position = 0 if isinstance(loader, StreamLoader) else run.state.position

    def read(reading: LoaderConfig) -> list[MicroBatch]:
        single.reading = reading
        with closing(single.micro_batches(run.state.epoch, position, most)) as source:  # ends the workers
            return list(itertools.islice(source, most))

    with generators_kept(run.strategy.device):
        return read_ahead(loader.dataset, loader.reading, read)


def read_ahead(dataset: Any, reading: LoaderConfig, read: Callable[[LoaderConfig], T]) -> T:
    """Read from a dataset before training, without changing the dataset's own state.

    Forked workers read copies of the dataset, so that its internal state (a generator, a counter) does not change. A
    dataset that a worker cannot read (on a GPU, or with workers of its own), or whose batches cannot be sent between
    processes, is read in this process, and its state is restored if it has a `state_dict`.

    Args:
        dataset: The dataset.
        reading: How it is read in training.
        read: Reads from the dataset with the given configuration.

    Returns:
        The result of `read`.

    Raises:
        Exception: Any error that `read` raises.
    """
    reading = dataclasses.replace(reading, pin_memory=False)
    if reading.workers:
        with _positions_kept():
            return read(reading)
    if _forks():
        with contextlib.suppress(Exception), _positions_kept():
            return read(dataclasses.replace(reading, workers=1, collate=_Portable(reading.collate)))
    if not is_stateful(dataset):
        return read(reading)
    kept = copy.deepcopy(dataset.state_dict())
    try:
        return read(reading)
    finally:
        dataset.load_state_dict(kept)


class _Portable:
    """A collator that raises if a worker cannot send the batch, for which the process would wait forever."""

    def __init__(self, collate: Collator) -> None:
        self._collate = collate

    def __call__(self, samples: list[Any]) -> Any:
        batch = self._collate(samples)
        ForkingPickler.dumps(batch)
        return batch


def _forks() -> bool:
    """Return whether workers are forked, without fixing the start method."""
    method = multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]
    return method == "fork"


@contextlib.contextmanager
def _positions_kept() -> Iterator[None]:
    """Restore the positions of files open for reading, which a process shares with its forks."""
    if not _forks():
        yield
        return
    import fcntl  # not on Windows

    positions = {}
    for number in map(int, os.listdir("/dev/fd")):
        with contextlib.suppress(OSError):  # not a file, or the descriptor of the listing itself
            if fcntl.fcntl(number, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
                positions[number] = os.lseek(number, 0, os.SEEK_CUR)
    try:
        yield
    finally:
        for number, position in positions.items():
            with contextlib.suppress(OSError):  # closed in the meantime
                os.lseek(number, position, os.SEEK_SET)
