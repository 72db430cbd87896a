"""`StreamReader`: reads the batches of an iterable dataset, and resumes at the position of an earlier start.

The state of a reader holds the sizes of all batches of the epoch, a dataset state from some samples ago, and a digest
of the samples since then. On a resume the reader loads that state and reads these samples again. If they differ, it
reads the epoch again from its start, with the same batch sizes.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Generator, Iterator, MutableMapping, MutableSequence, Sequence
from itertools import islice
from typing import Any, NamedTuple

from torch.utils.data import IterableDataset, get_worker_info
from tqdm import tqdm
from xxhash import xxh3_64

from trainer_kit.data.collate import warn_of_ready_batches
from trainer_kit.data.digest import digest, has_shuffle_buffer
from trainer_kit.data.fetcher import set_epoch
from trainer_kit.data.map_loader import LoaderConfig, from_workers
from trainer_kit.data.own_generators import OwnGenerators
from trainer_kit.data.sampling import Layout, mix
from trainer_kit.data.source import ReadyBatches, begin_epoch
from trainer_kit.data.workers import packed, unpacked, watch_division
from trainer_kit.errors import DataError
from trainer_kit.loss.batch import samples_in, split
from trainer_kit.state import is_stateful
from trainer_kit.utils.rng import generator_states, seed_generators, set_generator_states
from trainer_kit.utils.user_warnings import warn

COMPARED = 32
"""Minimal number of samples that verify a state; the maximum is twice as many plus two batches."""

_NO_STATE = "train_dataset has no state_dict"
_BUFFER = "the state of train_dataset does not hold its shuffle buffer"
_OTHER_ORDER = "the state of train_dataset does not bring back the samples that came after it"
_NOT_COMPARABLE = "the samples of train_dataset cannot be compared, so that its state cannot be verified"


class Read(NamedTuple):
    """A batch in its parts.

    Attributes:
        parts: The collated parts; the samples as one part if the loader deals them out.
        sizes: Samples of each part.
        width: The batch's items of the dataset: its samples, or 1 for a ready batch.
        data_state: The state of all readers after the batch; None in an evaluation.
    """

    parts: list[Any]
    sizes: list[int]
    width: int
    data_state: dict[str, Any] | None


class _Report(NamedTuple):
    """A reader's report on a resume: one before it reads samples again, one when it has found its position.

    Attributes:
        again: Samples to read again from the epoch's start.
        why: Why the dataset state cannot be used; empty if it is verified or not used.
        is_exact: Whether the last samples before the position are the same as before.
    """

    again: int = 0
    why: str = ""
    is_exact: bool = True


class _Mark:
    """A position to which a reader can return, and a digest of the samples read since.

    Args:
        batches: Batches of the epoch before the mark.
        dataset: The dataset's state at the mark; None at the epoch's start, or if there is no state.
    """

    def __init__(self, batches: int, dataset: Any) -> None:
        self.batches = batches
        self.dataset = dataset
        self.samples = 0
        self._digest: xxh3_64 | None = xxh3_64()

    def add(self, samples: int, digest: bytes | None) -> None:
        """Add a batch read since the mark."""
        self.samples += samples
        if digest is None:
            self._digest = None
        elif self._digest is not None:
            self._digest.update(digest)

    def hexdigest(self) -> str | None:
        return None if self._digest is None else self._digest.hexdigest()


class _Cursor:
    """Read a dataset batch by batch, and record the sizes of the batches and the marks.

    Args:
        source: The reader, whose dataset is at the mark.
        worker: Number of the worker.
        batches: Sizes of the epoch's batches before the mark.
        dataset_state: The dataset's state at the mark; None at the epoch's start.
    """

    def __init__(
        self, source: StreamReader, worker: int, batches: Sequence[int] = (), dataset_state: Any = None
    ) -> None:
        self.samples = 0
        self._runs: list[list[int]] = []  # run-length encoding of batch sizes: number, size
        for size in batches:
            self._count(size)
        mark = _Mark(len(batches), dataset_state)
        self._source = source
        self._worker = worker
        self._marks = (mark, mark)
        self._seed()
        self._iterator = iter(source.dataset)

    def _seed(self) -> None:
        source = self._source
        seed_generators(mix(source.reading.seed, source.epoch, self._worker, self.samples))

    def take(self, size: int) -> list[Any]:
        """Return the next samples, at most `size`; their randomness is seeded from their position.

        Raises:
            DataError: If the dataset raises.
        """
        self._seed()
        try:
            batch = list(islice(self._iterator, size))
            if not batch and self.samples == 0 and self._source.start is not None:
                # What was loaded is a state at the end of the epoch before, which has still to end.
                self._iterator = iter(self._source.dataset)
                batch = list(islice(self._iterator, size))
            return batch
        except Exception as error:
            raise DataError(
                f"the dataset raised after sample {self.samples} of worker {self._worker} "
                f"(epoch {self._source.epoch}): {type(error).__name__}: {error}"
            ) from error

    def note(self, batch: list[Any]) -> None:
        """Record a batch as read."""
        self._count(len(batch))
        found, new = digest(batch), self._marks[1]
        for mark in set(self._marks):
            mark.add(len(batch), found)
        if new.samples >= COMPARED:
            self._marks = (new, self._mark_here())

    def _count(self, size: int) -> None:
        self.samples += size
        if self._runs and self._runs[-1][1] == size:
            self._runs[-1][0] += 1
        else:
            self._runs.append([1, size])

    def _mark_here(self) -> _Mark:
        return _Mark(sum(number for number, _ in self._runs), self._source.dataset_state())

    def state(self, ended: bool) -> dict[str, Any]:
        """Return the reader's state. `ended` is stored since an exhausted dataset may start over from its state."""
        mark = self._marks[0]
        return {
            "batches": [list(run) for run in self._runs],
            "ended": ended,
            "mark": {"batches": mark.batches, "dataset": mark.dataset},
            "digest": mark.hexdigest(),
        }

    def skip(self, sizes: Sequence[int], bar: bool) -> None:
        """Read and drop batches, and set the mark after them."""
        with tqdm(total=sum(sizes), desc="reading again", unit=" samples", disable=None if bar else True) as progress:
            for size in sizes:
                self._count(len(self.take(size)))
                progress.update(size)
        if sizes:
            mark = self._mark_here()
            self._marks = (mark, mark)

    def repeats(self, sizes: Sequence[int], hexdigest: str | None) -> bool:
        """Read batches again; return whether they match the digest."""
        mark = self._marks[0]
        for size in sizes:
            batch = self.take(size)
            self.note(batch)
            if len(batch) < size:
                return False
        return mark.hexdigest() == hexdigest


class SeededCollator:
    """Collate the parts of batches. Generators of the collator's own are seeded from the place of the batch."""

    def __init__(self, reading: LoaderConfig, epoch: int) -> None:
        self._reading = reading
        self._epoch = epoch
        self._generators = OwnGenerators(reading.collate)
        self._generators.find()
        self._is_first = True

    def __call__(self, parts: list[list[Any]], worker: int, samples: int) -> list[Any]:
        collate, seed = self._reading.collate, mix(self._reading.seed, self._epoch, worker, samples)
        self._generators.seed(seed)
        if not self._is_first:
            return [collate(part) for part in parts]
        self._is_first = False
        states = generator_states()
        collated = [collate(list(map(_copied, part))) for part in parts]
        if not self._generators.find():
            return collated
        set_generator_states(states)  # the first draw made another generator
        return self(parts, worker, samples)

    def alone(self, samples: list[Any], start: int) -> Any:
        """Collate samples outside of a reader, with the randomness of their position; the generators stay unchanged."""
        states = generator_states()
        seed_generators(mix(self._reading.seed, self._epoch, start))
        batch = self([samples], 0, start)[0]
        set_generator_states(states)
        return batch


def _copied(sample: Any) -> Any:
    """Return what a collator may change in place."""
    return copy.copy(sample) if isinstance(sample, (MutableMapping, MutableSequence)) else sample


class StreamReader(IterableDataset[Any]):
    """An iterable over one worker's batches: the worker's number, the batch's parts, their sizes, width and the state.

    Args:
        dataset: A dataset with `__iter__`, or `ReadyBatches`.
        layout: Batch size, and how batches are cut.
        reading: Collation, seed and workers.
        epoch: Number of the epoch; -1 for an evaluation, which keeps no state.
        drop_last: Whether to drop a batch that is not full.
        ends: Positions at which a batch ends even if it is not full.
        start: The dataset's state before the epoch; None without a state, and with workers.
    """

    def __init__(
        self,
        dataset: Any,
        layout: Layout,
        reading: LoaderConfig,
        epoch: int = -1,
        drop_last: bool = False,
        ends: Sequence[int] = (),
        start: Any = None,
    ) -> None:
        self.dataset = dataset
        self.layout = layout
        self.reading = reading
        self.epoch = epoch
        self._drop_last = drop_last
        self._ends = ends
        self.start = start
        self._is_ready = isinstance(dataset, ReadyBatches)
        self._has_state = is_stateful(dataset) and not has_shuffle_buffer(dataset)
        self._states: list[dict[str, Any]] | None = None
        self._turn = 0
        self._trusted: list[bool] = []

    def resume(self, states: list[dict[str, Any]], turn: int) -> None:
        """Set the states to resume from.

        Args:
            states: One state per worker.
            turn: Number of the worker whose batch comes next.

        Raises:
            ValueError: If the number of workers is another one.
        """
        check_workers(len(states), self.reading.workers)
        self._states, self._turn, self._trusted = states, turn, [self._has_state] * len(states)

    def dataset_state(self) -> Any:
        """Return a copy of the dataset's state; None if it has none, has a shuffle buffer, or in an evaluation."""
        return copy.deepcopy(self.dataset.state_dict()) if self._has_state and self.epoch >= 0 else None

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        worker = info.id if info is not None else 0
        divides = watch_division()
        if self._has_state and info is None and self._trusted == [False]:  # it is no longer where the epoch starts
            self.dataset.load_state_dict(copy.deepcopy(self.start))
        if self._is_ready:
            begin_epoch(self.dataset.batches, self.epoch)
        else:
            set_epoch(self.dataset, self.epoch)
        cursor, ended = None, False
        if self._states is not None:
            state = self._states[worker]
            ended = state["ended"]
            if ended:
                yield from (_Report(), _Report())
            else:
                cursor = yield from self._found(worker, state)
            if worker < self._turn:
                yield None
        if not ended:
            yield from self._batches(worker, cursor or _Cursor(self, worker), divides)

    def _batches(
        self, worker: int, cursor: _Cursor, divides: Callable[[], bool]
    ) -> Iterator[tuple[int, list[Any], list[int], int, Any]]:
        full, is_last, keeps_state = self.layout.steps.batch_size, False, self.epoch >= 0
        collate, is_first = SeededCollator(self.reading, self.epoch), self.epoch <= 0 and not self._is_ready
        while not is_last:
            size = min(full, min((end - cursor.samples for end in self._ends if end > cursor.samples), default=full))
            batch = cursor.take(size)
            is_last = len(batch) < size
            if not batch or (self._drop_last and is_last):
                return
            if is_first and worker == self.layout.reader == 0:
                role = "train_dataset" if keeps_state else "the dataset"
                warn_of_ready_batches(role, batch[0], self.reading.collate)
                if self.reading.worker_init_fn is None and not divides():  # else that function may divide
                    warn(
                        f"{role} does not ask in which of {self.reading.workers} workers it is read, so that each "
                        "gives all of its samples; let it give its share by torch.utils.data.get_worker_info(), or set "
                        "dataloader_num_workers=1"
                    )
            is_first = False
            samples = samples_in(batch[0]) if self._is_ready else len(batch)
            cuts = [(0, samples)] if self.layout.deals_samples else self.layout.cut(0, samples)
            if keeps_state:
                cursor.note(batch)  # before a collator may change it
            if self._is_ready:
                parts = split(batch[0], cuts)
            elif self.layout.deals_samples:
                parts = [batch if get_worker_info() is None else packed(batch)]
            else:
                parts = collate([batch[start:stop] for start, stop in cuts], worker, cursor.samples)
            sizes = [stop - start for start, stop in cuts]
            yield worker, parts, sizes, len(batch), cursor.state(is_last) if keeps_state else None

    # Resuming

    def _found(self, worker: int, state: dict[str, Any]) -> Generator[_Report, None, _Cursor]:
        """Bring the dataset to its position, yielding two reports on the way; return the cursor there."""
        batches = list(itertools.chain.from_iterable([size] * count for count, size in state["batches"]))
        place, dataset_state, hexdigest = state["mark"]["batches"], state["mark"]["dataset"], state["digest"]
        before, since = batches[:place], batches[place:]
        if dataset_state is not None and self._trusted[worker]:
            is_exact = True
            try:
                self.dataset.load_state_dict(copy.deepcopy(dataset_state))
                cursor = _Cursor(self, worker, before, dataset_state)
                if hexdigest is None or not cursor.repeats(since, hexdigest):
                    yield _Report(why=_NOT_COMPARABLE if hexdigest is None else _OTHER_ORDER)
            except Exception as error:  # any error of the user's dataset; reading it again may work
                yield _Report(why=f"train_dataset does not take up its state ({type(error).__name__}: {error})")
            yield _Report()
        else:
            # There is no report if the mark is the epoch's start anyway.
            yield _Report(sum(batches) if before or not self._has_state else 0)
            cursor = _Cursor(self, worker)
            cursor.skip(before, bar=worker == self.layout.reader == 0)
            is_exact = cursor.repeats(since, hexdigest)
        yield _Report(is_exact=is_exact)
        return cursor

    def rounds(self) -> Iterator[Read]:
        """Yield the workers' batches in turn, each with the state of all workers after it.

        A resume that has to read samples again, or is not exact, is warned about.
        """
        workers = max(1, self.reading.workers)
        current = [_AT_THE_START] * workers
        if self._states is None:
            items = self._items()
        else:
            current, items = list(self._states), self._resumed(workers)
        for item in items:
            if item is not None:
                worker, parts, sizes, width, state = item
                if self.layout.deals_samples and self.reading.workers:
                    parts = [unpacked(parts[0])]
                data_state = None
                if state is not None:
                    current[worker] = state
                    data_state = {"workers": list(current), "turn": (worker + 1) % workers}
                yield Read(parts, sizes, width, data_state)

    def _items(self) -> Iterator[Any]:
        return iter(self) if self.reading.workers == 0 else from_workers(self, self.reading)

    def _resumed(self, workers: int) -> Iterator[Any]:
        """Yield the items of all workers after they found their positions; a state that failed is not tried again."""
        why = _BUFFER if is_stateful(self.dataset) else _NO_STATE
        while True:
            items = self._items()
            reports = list(islice(items, workers))
            failed = [report.why for report in reports if report.why]
            if not failed:
                break
            why = failed[0]
            self._trusted = [was and not report.why for was, report in zip(self._trusted, reports, strict=True)]
            del items, reports
        self._say_again(sum(report.again for report in reports), why)
        if False in {report.is_exact for report in islice(items, workers)}:  # `all` would leave reports unread
            self._say_inexact()
        yield from items

    def _say_again(self, samples: int, why: str) -> None:
        if samples and self.layout.reader == 0:
            remedy = "; give it state_dict and load_state_dict to resume immediately" if why == _NO_STATE else ""
            warn(
                f"{why}: {samples} {'batches' if self._is_ready else 'samples'} of epoch {self.epoch} are read again "
                f"and skipped, which takes as long as reading them did{remedy}"
            )

    def _say_inexact(self) -> None:
        if self.layout.reader == 0:
            warn(
                f"train_dataset gives other samples in epoch {self.epoch} than before: this resume is not exact; make "
                "its order follow from its files and set_epoch alone"
            )


_AT_THE_START: dict[str, Any] = {
    "batches": [],
    "ended": False,
    "mark": {"batches": 0, "dataset": None},
    "digest": _Mark(0, None).hexdigest(),
}


def check_workers(states: int, workers: int) -> None:
    """Check that a resume has as many workers as the checkpoint has states.

    Args:
        states: Number of states in the checkpoint.
        workers: Number of worker processes; 0 reads in this process.

    Raises:
        ValueError: If the numbers differ.
    """
    if states != max(1, workers):
        raise ValueError(
            f"the checkpoint holds the states of {states} workers of an iterable dataset, but "
            f"dataloader_num_workers={workers}; resume with the same number"
        )
