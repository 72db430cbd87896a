"""Training and evaluation batches of iterable datasets, which resume by their own state or by reading again."""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from itertools import groupby, islice
from typing import Any, NamedTuple

import torch
from xxhash import xxh3_64_intdigest

from trainer_kit.data.digest import has_shuffle_buffer
from trainer_kit.data.map_loader import GlobalBatch, LoaderConfig, MicroBatch, no_batch
from trainer_kit.data.reader import Read, SeededCollator, StreamReader
from trainer_kit.data.sampling import STAND_IN, Layout, epoch_length, part_of, parts, ranges
from trainer_kit.data.source import DataSource, ReadyBatches, batches_of, is_loader, seeds_epochs
from trainer_kit.loss.batch import Counts, count
from trainer_kit.state import is_stateful
from trainer_kit.utils.rng import generators_kept
from trainer_kit.utils.user_warnings import warn

_READY_PART = 2**40
"""Distance of the places of a ready batch's parts, above any number of batches."""


class _Batch(NamedTuple):
    """A batch to train on.

    Attributes:
        read: The batch as the reader yields it.
        start: Position of its first sample in the epoch.
        part: Number of the part of the epoch that it belongs to; skipped ranges separate the parts.
    """

    read: Read
    start: int
    part: int


class _Piece(NamedTuple):
    """A part of a batch that a process computes in one pass.

    Attributes:
        batch: The collated samples.
        counts: Counts of the part.
        start: Position of its first sample in the epoch.
        samples: Number of samples collated.
    """

    batch: Any
    counts: Counts
    start: int
    samples: int


class _Row(NamedTuple):
    """The batches that all processes of a step's layout take at the same time, as this process sees them.

    Attributes:
        own: What this process takes, by number of its turn in the step: pieces, or samples if these are dealt evenly.
        most: The passes of each turn: the pieces of the process that has most.
        first: What a dummy batch takes, its samples and its position: of the first batch; None if none is needed.
        part: As in `_Batch`.
        start: Position where the row begins.
        stop: Position after the row.
        batches: Batches of the row.
        data_state: The dataset's state after the row.
    """

    own: dict[int, list[Any]]
    most: dict[int, int]
    first: tuple[Any, int, int] | None
    part: int
    start: int
    stop: int
    batches: int
    data_state: dict[str, Any] | None


class StreamLoader:
    """The training batches of an iterable dataset.

    A dataset with `state_dict` and `load_state_dict` resumes by its state, if the state is verified to bring back the
    samples that came after it (see `reader`). Any other dataset is read again from the epoch's start up to the
    position, with a progress bar and a warning. Randomness drawn while reading is seeded before every batch from
    (seed, epoch, worker, samples read by the worker). Each worker has a copy of the dataset, which divides itself by
    `torch.utils.data.get_worker_info()`, as in PyTorch.

    Without workers, an epoch begins where the last one left the dataset, which may count its epochs itself. A resume
    brings it back there. With workers, every epoch is read from new copies of the dataset as it was given.

    Every process reads the whole dataset and keeps its own batches, which are dealt out in turn. Order, steps and
    states are therefore those of one process, a run resumes with any number of processes, and processes never wait for
    each other to read. The cost is that every process reads everything. The dataset must yield the same samples on all
    processes, without dividing itself by rank. If a step keeps the samples of another number of processes, batches are
    read as there, and this process collates its share of their samples itself.

    Args:
        dataset: A dataset with `__iter__`. Its `__len__`, if it has one, counts samples. `ReadyBatches` count batches:
            a position is a number of batches, and the layout's batch size 1.
        layout: Batch size, accumulation and processes.
        reading: Collation, seed and workers of each process.
        drop_last: Whether to drop batches that are not full, and an epoch's last ones if not every process has one.

    Attributes:
        passed_over: Positions to skip, as (epoch, start, stop); set it before `micro_batches`. Their samples are read
            and dropped. With several workers, every batch with such a position is dropped as a whole.
        has_equal_epochs: As far as the dataset's length says.

    Raises:
        ValueError: If an epoch has no batch according to the dataset's length.
    """

    def __init__(self, dataset: Any, layout: Layout, reading: LoaderConfig, drop_last: bool = False) -> None:
        self.dataset = dataset
        self.layout = layout
        self.reading = reading
        self.drop_last = drop_last
        self.passed_over: Sequence[tuple[int, int, int]] = ()
        self.has_equal_epochs = True
        self._readers = max(1, reading.workers)
        self._warned = False
        self._is_ready = isinstance(dataset, ReadyBatches)
        self._goes_back = reading.workers == 0 and is_stateful(dataset)
        self._may_count_epochs = self._goes_back and not (has_shuffle_buffer(dataset) or seeds_epochs(dataset))
        self._given: Any = None  # the dataset's state as it was given
        self._start: Any = None  # its state before the epoch
        self.epoch_length = 0  # unknown
        self._length = DataSource(dataset).length
        if self._length is not None:
            self._full, self._tail = batches_of(self._length, layout.steps.batch_size, self._readers, drop_last)
            self.epoch_length = epoch_length(self._full * layout.steps.batch_size + sum(self._tail), layout, drop_last)
            if self.epoch_length == 0:
                raise ValueError(no_batch(self._length, layout))

    def length_of(self, epoch: int) -> int:
        """Return the samples of an epoch; 0 if unknown."""
        return self.epoch_length

    def steps_left(self, epoch: int, position: int) -> int:
        """Return the optimizer steps from a position to the end of an epoch, according to the dataset's length.

        It assumes that workers share the samples evenly, as by `range(worker, length, workers)`.
        """
        kept = parts(position, self.epoch_length, ranges(self.passed_over, epoch))
        return sum(-(-self._rows_between(start, stop) // self.layout.accumulation) for start, stop in kept)

    def _rows_between(self, start: int, stop: int) -> int:
        """Count the rows of batches between two positions; the second is the end of an epoch or a part."""
        size, processes = self.layout.steps.batch_size, self.layout.steps.readers
        if stop == self.epoch_length:
            return self._rows_from(start) - self._rows_from(stop)
        if self._readers == 1:
            return -(-(stop - start) // (size * processes))
        return -(-(self._batches_from(start) - self._batches_from(stop)) // processes)

    def _rows_from(self, position: int) -> int:
        """Count the rows of batches from a position to the end of an epoch."""
        batches, processes = self._batches_from(position), self.layout.steps.readers
        return batches // processes if self.drop_last else -(-batches // processes)

    def _batches_from(self, position: int) -> int:
        """Count the batches of all processes from a position to the end of an epoch."""
        size, tail = self.layout.steps.batch_size, self._tail
        if self._readers == 1:
            assert self._length is not None
            left = self._length - position
            return left // size if self.drop_last else -(-left // size)
        left = self._full * size - position
        if left >= 0:
            return -(-left // size) + len(tail)
        return sum(sum(tail[:place]) >= -left for place in range(len(tail)))

    def micro_batches(
        self, epoch: int, position: int, steps: int, data_state: dict[str, Any] | None = None
    ) -> Iterator[MicroBatch]:
        """Yield the micro-batches of the next `steps` steps, starting at `position` in `epoch`.

        Args:
            epoch: Number of the epoch, from 0.
            position: Samples of the epoch that were trained on.
            steps: Number of optimizer steps.
            data_state: `GlobalBatch.data_state` of the last step, or what `state_after` returned at the end of an
                epoch; None where the training begins.

        Raises:
            ValueError: If `data_state` is None in the middle of an epoch or has another number of workers, or if an
                epoch yields no sample.
        """
        if position and data_state is None:
            raise ValueError(f"nothing says where train_dataset stood after {position} samples of epoch {epoch}")
        if data_state is not None and "next" in data_state:
            epoch, position, data_state = epoch + 1, 0, self.state_after(epoch, data_state)
        self._go_to_start(data_state)
        return self._micro_batches(epoch, position, steps, data_state if position else None)

    def _micro_batches(
        self, epoch: int, position: int, steps: int, data_state: dict[str, Any] | None
    ) -> Iterator[MicroBatch]:
        while steps > 0:
            for window in self._windows(epoch, position, data_state):
                position = window[0].global_batch.stop
                self._check_length(position)
                yield from window
                steps -= 1
                if steps == 0:
                    return
            if position == 0 and not ranges(self.passed_over, epoch):
                raise ValueError(self._no_sample(epoch))
            if self._length is not None and not self.passed_over and position + self._dropped < self._length:
                self._warn_of_length("fewer")
            epoch, position, data_state = epoch + 1, 0, None

    def _go_to_start(self, data_state: dict[str, Any] | None) -> None:
        """Bring the dataset to the start of the epoch; a worker's copy is there."""
        if not self._goes_back:
            return
        start = None if data_state is None else data_state.get("start")
        if start is None and self._given is None:
            self._given = self._start = copy.deepcopy(self.dataset.state_dict())
            return
        self._start = self._given if start is None else start
        try:
            with generators_kept(torch.device("cpu")):
                self.dataset.load_state_dict(copy.deepcopy(self._start))
                if is_loader(self.dataset) and start is not None:  # it may load it later, and then undo `set_epoch`
                    self.dataset.state_dict()
        except Exception as error:  # any error of the user's dataset
            if self.layout.reader == 0:
                why = f"{type(error).__name__}: {error}"
                warn(f"train_dataset starts as it was given, since it does not take up its state ({why})")
            self._given = self._start = copy.deepcopy(self.dataset.state_dict())

    def _no_sample(self, epoch: int) -> str:
        if epoch > 0 and DataSource(self.dataset).is_read_once:
            ready = "" if self._is_ready else ", and ReadyBatches(...) around it if it gives batches instead of samples"
            return (
                f"train_dataset is an iterator, which ended in epoch {epoch - 1}, before the training did; give an "
                f"object whose __iter__ starts from the beginning each time{ready}"
            )
        if self.drop_last:
            return (
                f"train_dataset gave no full batch for each process in epoch {epoch}, and dataloader_drop_last=True "
                "leaves out the rest; set it to False, or give more samples"
            )
        return f"train_dataset gave no sample in epoch {epoch}; it must give some each time"

    def resume(self, epoch: int, position: int, data_state: dict[str, Any] | None) -> dict[str, Any] | None:
        """Return the state to resume from; at the start of an epoch a sampler may have left another one."""
        return data_state if position or (data_state is not None and "start" in data_state) else None

    def state_after(self, epoch: int, data_state: dict[str, Any] | None) -> dict[str, Any] | None:
        """End an epoch; return the dataset's state there, with which the next one starts."""
        return {"start": data_state["next"]} if data_state is not None and "next" in data_state else None

    @property
    def _dropped(self) -> int:
        """The most samples of an epoch that `drop_last` leaves out."""
        return self.layout.steps.batch_size * self.layout.steps.readers * self._readers if self.drop_last else 0

    def _check_length(self, position: int) -> None:
        if self._length is not None and position > self._length:
            self._warn_of_length("more")

    def _warn_of_length(self, how_many: str) -> None:
        if self._warned:
            return
        self._warned = True
        items = "batches" if self._is_ready else "samples"
        workers = f"; each of the {self._readers} workers must give its share, see torch.utils.data.get_worker_info"
        warn(
            f"train_dataset has a length of {self._length}, but gave {how_many} {items}: epochs and steps are "
            f"miscounted, and a resume is not exact{workers if self._readers > 1 else ''}",
        )

    def _windows(self, epoch: int, position: int, data_state: dict[str, Any] | None) -> Iterator[list[MicroBatch]]:
        """Yield the micro-batches of each step of an epoch. One row is prefetched to find the last step.

        At the end, `_start` is the dataset's state there.
        """
        start = {"start": self._start} if self._may_count_epochs else {}
        rows, collate = self._rows(epoch, position, data_state), SeededCollator(self.reading, epoch)
        ahead = next(rows, None)
        while ahead is not None:
            part, fetched = ahead.part, [ahead]
            while (
                (ahead := next(rows, None)) is not None
                and ahead.part == part
                and len(fetched) < self.layout.accumulation
            ):
                fetched.append(ahead)
            state = fetched[-1].data_state
            if state is not None:
                state = state | start | ({"next": self._start} if start and ahead is None else {})
            window = GlobalBatch(
                epoch, fetched[0].start, fetched[-1].stop, closes_epoch=ahead is None, data_state=state
            )
            if state is not None and self.layout.readers > 1:
                digests = "".join(worker["digest"] or "" for worker in state["workers"])
                window.fingerprint, window.may_differ = xxh3_64_intdigest(digests.encode()) % 2**40, not self._is_ready
            pieces = [*_pieces(fetched, self.layout, collate)]
            for piece in pieces:
                window.add(piece.counts)
            yield [
                MicroBatch(
                    piece.batch, piece.counts, window, number, number == len(pieces) - 1, piece.start, [], piece.samples
                )
                for number, piece in enumerate(pieces)
            ]

    def _rows(self, epoch: int, position: int, data_state: dict[str, Any] | None) -> Iterator[_Row]:
        processes = self.layout.steps.readers
        cuts = [start for start, _ in ranges(self.passed_over, epoch)]
        for _, part in groupby(self._batches(epoch, position, data_state), key=lambda batch: batch.part):
            numbers = itertools.cycle(range(self.layout.accumulation))
            while (row := _dealt(islice(part, processes), self.layout, next(numbers))) is not None:
                if row.batches == processes or not self.drop_last or row.stop in cuts:
                    yield row
        if self._may_count_epochs:
            self._start = copy.deepcopy(self.dataset.state_dict())

    def _batches(self, epoch: int, position: int, data_state: dict[str, Any] | None) -> Iterator[_Batch]:
        """Yield the batches of an epoch starting at `position`, without those that hold skipped positions."""
        passed_over = ranges(self.passed_over, epoch)
        # A single reader knows the positions, and ends a batch there.
        ends = sorted({end for each in passed_over for end in each}) if self._readers == 1 else []
        reading = self.reading
        if self.layout.deals_samples:
            reading = dataclasses.replace(reading, pin_memory=False)  # of samples that are not collated yet
        reader = StreamReader(self.dataset, self.layout, reading, epoch, self.drop_last, ends, self._start)
        if data_state is not None:
            reader.resume(data_state["workers"], data_state["turn"])
        part, stop = 0, position
        for read in reader.rounds():
            start, stop = stop, stop + read.width
            if any(first < stop and start < last for first, last in passed_over):
                part += 1
            else:
                yield _Batch(read, start, part)


def _dealt(batches: Iterator[_Batch], layout: Layout, number: int) -> _Row | None:
    """Deal out a row of batches without keeping those of other processes; None if no batch is left.

    Args:
        batches: The batches: one for each process of the step's layout, less at an end.
        layout: Batch size and processes.
        number: Number of the row in the step.
    """
    own: dict[int, list[Any]] = {}
    most: dict[int, int] = {}
    first, row_start, row_part, count_of_batches = None, 0, 0, 0
    place, offset = number * layout.steps.readers, number * layout.global_micro_batch_size
    for read, start, part in batches:
        if count_of_batches == 0:
            first, row_start, row_part = (read.parts[0], read.sizes[0], start), start, part
        if layout.deals_samples:
            most.update(dict.fromkeys(_deal_samples(read, start, offset, layout, own), 1))
        else:
            turn, reader = divmod(place, layout.readers)
            if reader == layout.reader:
                own[turn] = _pieces_of(read, start)
            most[turn] = max(most.get(turn, 0), len(read.parts))
        place, offset, count_of_batches = place + 1, offset + read.width, count_of_batches + 1
        stop, data_state = start + read.width, read.data_state
    if first is None:
        return None
    if all(len(own.get(turn, ())) >= passes for turn, passes in most.items()):
        first = None
    elif layout.deals_samples:
        samples = min(STAND_IN, layout.at_once, first[1])
        first = first[0][:samples], samples, row_start
    return _Row(own, most, first, row_part, row_start, stop, count_of_batches, data_state)


def _deal_samples(read: Read, start: int, offset: int, layout: Layout, own: dict[int, list[Any]]) -> Iterator[int]:
    """Add this process's share of a batch's samples to `own`, with their positions; yield the turns that they are for.

    Args:
        read: The batch, not collated.
        start: Position of its first sample in the epoch.
        offset: Samples of the step before it, if all its batches are full.
        layout: Batch size and processes.
        own: This process's samples by turn.
    """
    samples, whole, readers = read.parts[0], layout.global_batch_size, layout.readers
    parts, numbered = layout.rounds(whole) * readers, [*enumerate(samples, start)]
    for turn, (begin, end) in enumerate(layout.deal(0, whole)):
        first, last = part_of(0, whole, turn * readers, parts)[0], part_of(0, whole, (turn + 1) * readers - 1, parts)[1]
        if first < offset + len(samples) and offset < last:
            if share := numbered[max(begin - offset, 0) : max(end - offset, 0)]:
                own.setdefault(turn, []).extend(share)
            yield turn


def _pieces_of(read: Read, start: int) -> list[_Piece]:
    """Return the pieces of a batch that a process takes whole."""
    # The parts of a ready batch have one position; their places only have to differ, since they are seeds.
    steps = [_READY_PART] * len(read.sizes) if read.width < sum(read.sizes) else read.sizes
    places = itertools.accumulate(steps, initial=start)
    return [
        _Piece(each, count(each, samples), place, samples)
        for each, samples, place in zip(read.parts, read.sizes, places, strict=False)
    ]


def _pieces(rows: list[_Row], layout: Layout, collate: SeededCollator) -> Iterator[_Piece]:
    """Yield the pieces of a step: this process's own, and dummy batches where other processes have more."""
    by_turn: dict[int, list[_Row]] = {}
    for row in rows:
        for turn in row.most:
            by_turn.setdefault(turn, []).append(row)
    for turn, sharing in by_turn.items():
        own = [each for row in sharing for each in row.own.get(turn, ())]
        if layout.deals_samples and own:
            start, batch = own[0][0], collate.alone([sample for _, sample in own], own[0][0])
            own = [_Piece(batch, count(batch, len(own)), start, len(own))]
        yield from own
        for _ in range(max(row.most[turn] for row in sharing) - len(own)):
            batch, samples, start = next(row.first for row in sharing if row.first is not None)
            batch = collate.alone(batch, start) if layout.deals_samples else batch
            yield _Piece(batch, count(batch, samples).as_nothing(), start, samples)
