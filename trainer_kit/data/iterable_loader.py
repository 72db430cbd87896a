"""Training and evaluation batches of iterable datasets, resumed by their own state or by reading them again."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Sequence
from itertools import groupby, islice
from typing import Any, NamedTuple

from trainer_kit.data.map_loader import GlobalBatch, LoaderConfig, MicroBatch, no_batch
from trainer_kit.data.reader import Read, StreamReader
from trainer_kit.data.sampling import Layout, epoch_length, parts, ranges
from trainer_kit.loss.batch import Counts, count
from trainer_kit.state import Stateful
from trainer_kit.utils.user_warnings import warn


class _Batch(NamedTuple):
    """A batch to train on.

    Attributes:
        read: What was read.
        start: Position of its first sample in the epoch.
        part: Number of the part of the epoch that it belongs to; what is passed over lies between two.
    """

    read: Read
    start: int
    part: int


class _Piece(NamedTuple):
    """What a process computes at once.

    Attributes:
        batch: The batch.
        counts: What it counts for.
        start: Position of its first sample in the epoch.
        samples: Samples that it was made of.
    """

    batch: Any
    counts: Counts
    start: int
    samples: int


class _Row(NamedTuple):
    """The batches that all processes take at once, as this one sees them.

    Attributes:
        pieces: This process's own batch in its parts; where others have more, the row's first part stands in.
        part: As in `_Batch`.
        start: Position where the row begins.
        stop: Position after the row.
        batches: Batches of the row.
        data_state: The dataset's state after the row.
    """

    pieces: list[_Piece]
    part: int
    start: int
    stop: int
    batches: int
    data_state: dict[str, Any] | None


class StreamLoader:
    """The training batches of an iterable dataset.

    A dataset with `state_dict` and `load_state_dict` resumes where it was, if its state is seen to bring back the
    samples that came after it (see `reader`); another one is read again from the epoch's start up to the position, with
    a progress bar and a warning. Randomness drawn while reading is seeded before every batch from (seed, epoch, worker,
    samples that it has read). With workers, each has a copy of the dataset, which divides itself by
    `torch.utils.data.get_worker_info()`, as in PyTorch.

    Every process reads the whole dataset and keeps the batches that are its own, dealt out in turn. So order, steps
    and states are those of one process, any number of processes can go on, and nobody waits for anybody; the price is
    the reading. The dataset must give all processes the same samples: it does not divide itself by rank.

    Args:
        dataset: Has `__iter__`; `__len__`, where it has one, counts samples.
        layout: Batch size, accumulation and processes.
        reading: Collation, seed and workers (of each process).
        drop_last: Leave out batches that are not full, and an epoch's last ones where not every process has one.

    Attributes:
        passed_over: (epoch, start, stop) of positions that are not trained on; set it before `micro_batches`. They are
            read and dropped; with several workers whole batches are, every one that holds such a position.

    Raises:
        ValueError: If the dataset's length says that an epoch holds no batch.
    """

    def __init__(self, dataset: Any, layout: Layout, reading: LoaderConfig, drop_last: bool = False) -> None:
        self.dataset = dataset
        self.layout = layout
        self.reading = reading
        self.drop_last = drop_last
        self.passed_over: Sequence[tuple[int, int, int]] = ()
        self._readers = max(1, reading.workers)
        self._warned = False
        self._fresh: Any = None  # the dataset's state where an epoch begins
        self.epoch_length = 0  # unknown
        if hasattr(dataset, "__len__"):
            self._full, self._tail = _batches_of(len(dataset), layout.batch_size, self._readers, drop_last)
            self.epoch_length = epoch_length(self._full * layout.batch_size + sum(self._tail), layout, drop_last)
            if self.epoch_length == 0:
                raise ValueError(no_batch(len(dataset), layout))

    def steps_left(self, epoch: int, position: int) -> int:
        """Optimizer steps from a position to the end of an epoch, as far as the dataset's length is true.

        Workers are taken to share the samples evenly, as `range(worker, length, workers)` does.
        """
        kept = parts(position, self.epoch_length, ranges(self.passed_over, epoch))
        return sum(-(-self._rows_between(start, stop) // self.layout.accumulation) for start, stop in kept)

    def _rows_between(self, start: int, stop: int) -> int:
        """How often all processes take a batch between two positions, of which the second ends an epoch or a part."""
        size, processes = self.layout.batch_size, self.layout.world_size
        if stop == self.epoch_length:
            return self._rows_from(start) - self._rows_from(stop)
        if self._readers == 1:
            return -(-(stop - start) // (size * processes))
        return -(-(self._batches_from(start) - self._batches_from(stop)) // processes)

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
        """The micro-batches of the next `steps` steps, from `position` in `epoch` on.

        Args:
            epoch: Number of the epoch, from 0.
            position: Samples of it that were trained on.
            steps: Steps to take.
            data_state: `GlobalBatch.data_state` of the last step; None at the beginning of an epoch.

        Raises:
            ValueError: If there is no `data_state` in the middle of an epoch, or it is one of other workers.
        """
        if position and data_state is None:
            raise ValueError(f"nothing says where train_dataset stood after {position} samples of epoch {epoch}")
        if isinstance(self.dataset, Stateful):
            if self._fresh is None:
                self._fresh = copy.deepcopy(self.dataset.state_dict())
            elif data_state is None and self.reading.workers == 0:  # it may stand in the middle of an epoch
                self.dataset.load_state_dict(copy.deepcopy(self._fresh))
        while steps > 0:
            for window in self._windows(epoch, position, data_state):
                position = window[0].global_batch.stop
                self._check_length(position)
                yield from window
                steps -= 1
                if steps == 0:
                    return
            if position == 0 and not ranges(self.passed_over, epoch):
                raise ValueError(f"train_dataset gave no sample in epoch {epoch}; it must give some each time")
            epoch, position, data_state = epoch + 1, 0, None

    def _check_length(self, position: int) -> None:
        if self._warned or self.epoch_length == 0 or position <= len(self.dataset):
            return
        self._warned = True
        workers = f"; each of the {self._readers} workers must give its share, see torch.utils.data.get_worker_info"
        warn(
            f"train_dataset has a length of {len(self.dataset)}, but gave more samples: epochs and steps are "
            f"miscounted, and a resume is not exact{workers if self._readers > 1 else ''}",
        )

    def _windows(self, epoch: int, position: int, data_state: dict[str, Any] | None) -> Iterator[list[MicroBatch]]:
        """The steps of one epoch. One row is read ahead, to know which step is the last."""
        rows = self._rows(epoch, position, data_state)
        ahead = next(rows, None)
        while ahead is not None:
            part, fetched = ahead.part, [ahead]
            while (
                (ahead := next(rows, None)) is not None
                and ahead.part == part
                and len(fetched) < self.layout.accumulation
            ):
                fetched.append(ahead)
            window = GlobalBatch(
                epoch, fetched[0].start, fetched[-1].stop, closes_epoch=ahead is None, data_state=fetched[-1].data_state
            )
            pieces = [piece for row in fetched for piece in row.pieces]
            for piece in pieces:
                window.add(piece.counts)
            yield [
                MicroBatch(
                    piece.batch, piece.counts, window, number, number == len(pieces) - 1, piece.start, [], piece.samples
                )
                for number, piece in enumerate(pieces)
            ]

    def _rows(self, epoch: int, position: int, data_state: dict[str, Any] | None) -> Iterator[_Row]:
        processes = self.layout.world_size
        cuts = [start for start, _ in ranges(self.passed_over, epoch)]
        for _, part in groupby(self._batches(epoch, position, data_state), key=lambda batch: batch.part):
            while (row := _dealt(islice(part, processes), self.layout)) is not None:
                if row.batches == processes or not self.drop_last or row.stop in cuts:
                    yield row

    def _batches(self, epoch: int, position: int, data_state: dict[str, Any] | None) -> Iterator[_Batch]:
        """The batches of an epoch from `position` on, without those that hold what is passed over."""
        passed_over = ranges(self.passed_over, epoch)
        # A reader that reads alone knows the positions, and ends a batch there.
        ends = sorted({end for each in passed_over for end in each}) if self._readers == 1 else []
        reader = StreamReader(self.dataset, self.layout, self.reading, epoch, self.drop_last, ends, self._fresh)
        if data_state is not None:
            reader.resume(data_state["workers"], data_state["turn"])
        part, stop = 0, position
        for read in reader.rounds():
            start, stop = stop, stop + read.samples
            if any(first < stop and start < last for first, last in passed_over):
                part += 1
            else:
                yield _Batch(read, start, part)


def stream_evaluation_batches(dataset: Any, layout: Layout, reading: LoaderConfig) -> Iterator[tuple[Any, Counts]]:
    """This process's batches of an evaluation over an iterable dataset, in its order (with workers: in theirs).

    As in training, every process reads the whole dataset; its k-th batch is number k * world_size + rank.
    """
    for read in islice(StreamReader(dataset, layout, reading).rounds(), layout.rank, None, layout.world_size):
        for batch, samples in zip(read.parts, read.sizes, strict=True):
            yield batch, count(batch, samples)


def _dealt(batches: Iterator[_Batch], layout: Layout) -> _Row | None:
    """Deals out a row of batches, one a process; those of others are let go at once. None where no batch is left."""
    pieces: list[_Piece] = []
    number, most, first = -1, 0, None
    for number, (read, start, part) in enumerate(batches):
        if number == 0:
            first, first_samples, row_start, row_part = read.parts[0], read.sizes[0], start, part
        if number == layout.rank:
            places = itertools.accumulate(read.sizes, initial=start)
            pieces = [
                _Piece(each, count(each, samples), place, samples)
                for each, samples, place in zip(read.parts, read.sizes, places, strict=False)
            ]
        most, stop, data_state = max(most, len(read.parts)), start + read.samples, read.data_state
    if number < 0:
        return None
    while len(pieces) < most:  # a stand-in
        pieces.append(_Piece(first, count(first, first_samples).as_nothing(), row_start, first_samples))
    return _Row(pieces, row_part, row_start, stop, number + 1, data_state)


def _batches_of(length: int, size: int, readers: int, drop_last: bool) -> tuple[int, list[int]]:
    """How many full batches an epoch of this length begins with, and the sizes of those that follow.

    The readers take turns; each has its share and ends with what is left of it.
    """
    least, more = divmod(length, readers)
    rounds = least // size  # in which every reader has a full batch
    shares = [least + (reader < more) - rounds * size for reader in range(readers)]
    tail = [min(size, share - start) for start in (0, size) for share in shares]
    return rounds * readers, [each for each in tail if each == size or (each > 0 and not drop_last)]
