"""Training and evaluation batches of iterable datasets, resumed by their own state or by skipping forward."""

from __future__ import annotations

import copy
import dataclasses
import warnings
from collections.abc import Iterator
from itertools import islice
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info
from tqdm import tqdm

from trainer_kit.data.fetch import DataError, set_epoch
from trainer_kit.data.loader import MicroBatch, Reading, Window, from_workers, no_batch
from trainer_kit.data.order import Layout, epoch_length, mix
from trainer_kit.loss import Counts, count
from trainer_kit.state import Stateful
from trainer_kit.strategies.base import seed_generators

_AT_THE_START: dict[str, Any] = {"batches": 0, "ended": False, "dataset": None}


@dataclasses.dataclass(slots=True)
class _Row:
    """The batches that all processes take at once, as this one sees them.

    Attributes:
        batch: This process's own; where it got none the first of the row, which stands in.
        counts: What it counts for.
        before: Samples of the row before it.
        samples: Samples of the row.
        batches: Batches of the row.
        data_state: The dataset's state after the row.
    """

    batch: Any
    counts: Counts
    before: int = 0
    samples: int = 0
    batches: int = 0
    data_state: dict[str, Any] | None = None


class StreamLoader:
    """The training batches of an iterable dataset.

    A dataset with `state_dict` and `load_state_dict` goes on where it was; another one is read again from the
    epoch's start and passed over up to the position, with a progress bar and a warning. Randomness drawn while
    reading is seeded before every batch from (seed, epoch, worker, batch). With workers, each has a copy of the
    dataset, which divides itself by `torch.utils.data.get_worker_info()`, as in PyTorch.

    Every process reads the whole dataset and keeps the batches that are its own, dealt out in turn. So order, steps
    and states are those of one process, any number of processes can go on, and nobody waits for anybody; the price is
    the reading. The dataset must give all processes the same samples: it does not divide itself by rank.

    Args:
        dataset: Has `__iter__`; `__len__`, where it has one, counts samples.
        layout: Batch size, accumulation and processes.
        reading: Collation, seed and workers (of each process).
        drop_last: Leave out batches that are not full, and an epoch's last ones where not every process has one.

    Raises:
        ValueError: If the dataset's length says that an epoch holds no batch.
    """

    def __init__(self, dataset: Any, layout: Layout, reading: Reading, drop_last: bool = False) -> None:
        self.dataset = dataset
        self.layout = layout
        self.reading = reading
        self.drop_last = drop_last
        self._readers = max(1, reading.workers)
        self._warned = False
        self.epoch_length = 0  # unknown
        if hasattr(dataset, "__len__"):
            self._full, self._tail = _batches_of(len(dataset), layout.batch_size, self._readers, drop_last)
            self.epoch_length = epoch_length(self._full * layout.batch_size + sum(self._tail), layout, drop_last)
            if self.epoch_length == 0:
                raise ValueError(no_batch(len(dataset), layout))

    def steps_between(self, position: int, stop: int) -> int:
        """Optimizer steps between two positions of an epoch, as far as the dataset's length is true.

        Workers are taken to share the samples evenly, as `range(worker, length, workers)` does.
        """
        return max(0, -(-(self._rows_from(position) - self._rows_from(stop)) // self.layout.accumulation))

    def _rows_from(self, position: int) -> int:
        """How often all processes take a batch from a position to the end of an epoch."""
        batches, processes = self._batches_from(position), self.layout.world_size
        return batches // processes if self.drop_last else -(-batches // processes)

    def _batches_from(self, position: int) -> int:
        """Batches of all processes from a position to the end of an epoch."""
        size, tail = self.layout.batch_size, self._tail
        if self._readers == 1:
            left = len(self.dataset) - position
            return left // size if self.drop_last else -(-left // size)
        left = self._full * size - position
        if left >= 0:
            return -(-left // size) + len(tail)
        return sum(sum(tail[:place]) >= -left for place in range(len(tail)))

    def micro_batches(
        self, epoch: int, position: int, steps: int, data_state: dict[str, Any] | None = None
    ) -> Iterator[MicroBatch]:
        """The micro-batches of the next `steps` steps, from `position` in `epoch` on."""
        while steps > 0:
            for window in self._windows(epoch, position, data_state):
                position = window[0].window.stop
                self._check_length(position)
                yield from window
                steps -= 1
                if steps == 0:
                    return
            if position == 0:
                raise ValueError(f"train_dataset gave no sample in epoch {epoch}; it must give some each time")
            epoch, position, data_state = epoch + 1, 0, None

    def _check_length(self, position: int) -> None:
        if self._warned or self.epoch_length == 0 or position <= len(self.dataset):
            return
        self._warned = True
        workers = f"; each of the {self._readers} workers must give its share, see torch.utils.data.get_worker_info"
        warnings.warn(
            f"train_dataset has a length of {len(self.dataset)}, but gave more samples: epochs and steps are "
            f"miscounted, and a resume is not exact{workers if self._readers > 1 else ''}",
            stacklevel=2,
        )

    def _windows(self, epoch: int, position: int, data_state: dict[str, Any] | None) -> Iterator[list[MicroBatch]]:
        """The steps of one epoch. One row is read ahead, to know which step is the last."""
        rows = self._rows(self._batches(epoch, position, data_state))
        ahead = list(islice(rows, 1))
        while ahead:
            fetched = ahead + list(islice(rows, self.layout.accumulation - 1))
            ahead = list(islice(rows, 1))
            stop = position + sum(row.samples for row in fetched)
            window = Window(epoch, stop, closes_epoch=not ahead, data_state=fetched[-1].data_state)
            micro_batches = []
            for number, row in enumerate(fetched):
                window.add(row.counts)
                last = number == len(fetched) - 1
                micro_batches.append(MicroBatch(row.batch, row.counts, window, number, last, position + row.before, []))
                position += row.samples
            yield micro_batches

    def _rows(self, batches: Iterator[tuple[Any, dict[str, Any] | None]]) -> Iterator[_Row]:
        processes = self.layout.world_size
        while (row := _dealt(islice(batches, processes), self.layout.rank)) is not None:
            if row.batches == processes or not self.drop_last:
                yield row

    def _batches(
        self, epoch: int, position: int, data_state: dict[str, Any] | None
    ) -> Iterator[tuple[Any, dict[str, Any] | None]]:
        source = _BatchSource(self.dataset, self.layout.batch_size, self.reading, epoch, self.drop_last)
        if data_state is not None:
            source.resume(data_state["workers"], data_state["turn"])
        batches = _rounds(source, self.reading)
        return self._passed_over(batches, epoch, position) if position and data_state is None else batches

    def _passed_over(
        self, batches: Iterator[tuple[Any, dict[str, Any] | None]], epoch: int, position: int
    ) -> Iterator[tuple[Any, dict[str, Any] | None]]:
        warnings.warn(
            f"train_dataset has no state_dict: {position} samples of epoch {epoch} are read again and passed over; "
            "give it state_dict and load_state_dict to resume at once",
            stacklevel=2,
        )
        # disable=None: no bar where there is no terminal.
        with tqdm(total=position, desc="passing over samples", unit=" samples", disable=None) as bar:
            passed = 0
            while passed < position and (item := next(batches, None)) is not None:
                samples = count(item[0]).samples
                passed += samples
                bar.update(samples)
        if passed > position:
            warnings.warn(
                f"{passed - position} samples of epoch {epoch} are left out: without state_dict a dataset can only be "
                "resumed exactly with the batch size that it was read with",
                stacklevel=2,
            )
        yield from batches


def stream_evaluation_batches(dataset: Any, layout: Layout, reading: Reading) -> Iterator[tuple[Any, Counts]]:
    """This process's batches of an evaluation over an iterable dataset, in its order (with workers: in theirs).

    As in training, every process reads the whole dataset; its k-th batch is number k * world_size + rank.
    """
    source = _BatchSource(dataset, layout.batch_size, reading, epoch=-1, drop_last=False)
    for batch, _ in islice(_rounds(source, reading), layout.rank, None, layout.world_size):
        yield batch, count(batch)


def _dealt(batches: Iterator[tuple[Any, dict[str, Any] | None]], rank: int) -> _Row | None:
    """Deals out a row of batches, one a process; those of others are let go at once. None where no batch is left."""
    row = None
    for number, (batch, data_state) in enumerate(batches):
        counts = count(batch)
        if row is None:
            row = _Row(batch, counts)
        if number == rank:
            row.batch, row.counts, row.before = batch, counts, row.samples
        row.samples += counts.samples
        row.batches += 1
        row.data_state = data_state
    if row is not None and row.batches <= rank:
        row.counts = row.counts.as_nothing()
    return row


def _batches_of(length: int, size: int, readers: int, drop_last: bool) -> tuple[int, list[int]]:
    """How many full batches an epoch of this length begins with, and the sizes of those that follow.

    The readers take turns; each has its share and ends with what is left of it.
    """
    least, more = divmod(length, readers)
    rounds = least // size  # in which every reader has a full batch
    shares = [least + (reader < more) - rounds * size for reader in range(readers)]
    tail = [min(size, share - start) for start in (0, size) for share in shares]
    return rounds * readers, [each for each in tail if each == size or (each > 0 and not drop_last)]


class _BatchSource(IterableDataset[Any]):
    """Batches of one worker, each with the dataset's state after it."""

    def __init__(self, dataset: Any, batch_size: int, reading: Reading, epoch: int, drop_last: bool) -> None:
        self.dataset = dataset
        self.batch_size = batch_size
        self.reading = reading
        self.epoch = epoch
        self.drop_last = drop_last
        self.stateful = isinstance(dataset, Stateful)
        self.states: list[dict[str, Any]] | None = None
        self.turn = 0

    def resume(self, states: list[dict[str, Any]], turn: int) -> None:
        """Goes on from one state a worker; `turn` is the worker whose batch is due."""
        self.states, self.turn = states, turn

    def __iter__(self) -> Iterator[tuple[int, Any, dict[str, Any] | None]]:
        info = get_worker_info()
        worker = info.id if info is not None else 0
        number, ended = 0, False
        set_epoch(self.dataset, self.epoch)
        if self.states is not None:
            state = self.states[worker]
            number, ended = state["batches"], state["ended"]
            if state["dataset"] is not None:
                self.dataset.load_state_dict(copy.deepcopy(state["dataset"]))
            if worker < self.turn:
                yield worker, None, None
        seed_generators(mix(self.reading.seed, self.epoch, worker, number))
        samples = iter(self.dataset)
        while not ended:
            seed_generators(mix(self.reading.seed, self.epoch, worker, number))
            batch = self._next(samples, worker, number)
            ended = len(batch) < self.batch_size
            if not batch or (self.drop_last and ended):
                return
            number += 1
            collated = self.reading.collate(batch)
            yield worker, collated, self._state(number, ended)

    def _next(self, samples: Iterator[Any], worker: int, number: int) -> list[Any]:
        try:
            return list(islice(samples, self.batch_size))
        except Exception as error:
            raise DataError(
                f"the dataset raised in batch {number} of worker {worker} (epoch {self.epoch}): "
                f"{type(error).__name__}: {error}"
            ) from error

    def _state(self, batches: int, ended: bool) -> dict[str, Any] | None:
        """A dataset that has ended may begin anew with its state: hence `ended`."""
        if not self.stateful:
            return None
        return {"batches": batches, "ended": ended, "dataset": copy.deepcopy(self.dataset.state_dict())}


def _rounds(source: _BatchSource, reading: Reading) -> Iterator[tuple[Any, dict[str, Any] | None]]:
    """The workers' batches in turn, each with the state of all workers after it."""
    workers, states = max(1, reading.workers), source.states
    if states is not None and len(states) != workers:
        raise ValueError(
            f"the checkpoint holds the states of {len(states)} workers of an iterable dataset, but "
            f"dataloader_num_workers={reading.workers}; resume with the same number"
        )
    current: list[dict[str, Any] | None] = list(states) if states else [None] * workers
    items = iter(source) if reading.workers == 0 else from_workers(source, reading)
    for worker, batch, state in items:
        if batch is None:
            continue
        if state is None:
            yield batch, None
            continue
        current[worker] = state
        yield batch, {"workers": [each or _AT_THE_START for each in current], "turn": (worker + 1) % workers}
