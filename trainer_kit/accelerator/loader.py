"""Prepared loaders: a DataLoader's batches in a resumable order, sharded over the processes."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterable, Iterator
from itertools import cycle, islice
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, default_collate

from trainer_kit.accelerator.concat import joined, row_count, spread
from trainer_kit.accelerator.reader import BatchRequest, CountingCollator, Dealt, Reader, WorkerReader
from trainer_kit.accelerator.unavailable import member
from trainer_kit.accelerator.wrappers import AccumulationState
from trainer_kit.data.collate import default_collate_in_process
from trainer_kit.data.fetcher import set_epoch
from trainer_kit.data.sampling import mix
from trainer_kit.strategies.base import Strategy
from trainer_kit.utils.rng import generators_kept, seed_generators

logger = logging.getLogger("trainer_kit")

_END = object()


class LoaderPosition(NamedTuple):
    """Position of a loader in a checkpoint.

    Attributes:
        epoch: Number of the pass.
        position: Number of batches that the loader has yielded.
        open: Whether the loader was being iterated.
        complete: Whether the last batch was yielded.
    """

    epoch: int
    position: int
    open: bool
    complete: bool


class PreparedLoader(DataLoader[Any]):
    """A DataLoader whose batches come in an order f(seed, epoch), each to one process, on its device.

    Process r of n reads every n-th batch, so that all processes together see the order of a single process. Where one
    process drives several devices, its batch holds the samples of one batch for each device. If the last round is
    incomplete, samples from the beginning of the epoch are repeated to fill it, and every process has the same number
    of batches; `Accelerator.gather_for_metrics` removes the repeats. With `drop_last` the DataLoader drops that round
    instead. A single device repeats nothing: its last batch may be smaller, which triggers a recompilation where
    computations are compiled per shape. The randomness in reading a batch depends on (seed, epoch, batch) only, not on
    the workers, and leaves the global generators unchanged. A custom sampler must draw its randomness from the global
    generators, from its `generator`, or from `set_epoch`.

    Every process reads the whole of an iterable dataset, or of a DataLoader subclass with its own iteration, and keeps
    its share of the batches. The samples of an incomplete last round are distributed evenly, with repeats only where
    their number does not divide; batches that cannot be cut into samples, or whose samples have different shapes, are
    repeated as a whole.

    All other attributes of the DataLoader (`dataset`, `batch_size`, …) are available here too.

    Args:
        loader: The user's DataLoader.
        strategy: Strategy that provides the devices and the processes.
        flow: Accumulation state, which tracks the loaders that are being iterated.
        seed: Seed of the order; the same on all processes.
        split_batches: See `DataLoaderConfiguration`.
        device_placement: Whether to move batches to the device.
        even_batches: Whether samples are repeated so that all processes have the same number of batches. If False, the
            last batches of some processes of a dataset with indices are smaller or missing. Can be set.

    Attributes:
        loader: The user's DataLoader.
        epoch: Number of the current or next pass.
        gave_last: Whether the latest batch is the last of its pass.
        rows: Number of rows in the latest batch.
        real: How many of these rows are not repeats.

    Raises:
        ValueError: If the DataLoader shards its samples itself, or cannot be split.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        strategy: Strategy,
        flow: AccumulationState,
        seed: int,
        split_batches: bool = False,
        device_placement: bool = True,
        even_batches: bool = True,
    ) -> None:
        # Not super().__init__(): the settings are the user's DataLoader's.
        self.loader = loader
        self.even_batches = even_batches
        self.epoch = 0
        self.gave_last, self.rows, self.real = False, 0, 0
        self._strategy = strategy
        self._flow = flow
        self._seed = seed
        self._placement = device_placement
        self._devices = strategy.devices
        self._shares = strategy.world_size * self._devices
        self._first = strategy.rank * self._devices  # first share of this process
        self._splits = split_batches and self._shares > 1
        self._streams = isinstance(loader.dataset, IterableDataset) or _iterates_itself(loader)
        inner = getattr(loader.batch_sampler, "sampler", None)
        samplers = () if self._streams else (loader.batch_sampler, inner, loader.sampler)
        self._samplers = [
            each for number, each in enumerate(samplers) if each is not None and not _holds(samplers[:number], each)
        ]
        self._position, self._open = 0, False
        self._stand: LoaderPosition | None = None
        self._workers: WorkerReader | None = None
        self._counting = loader
        if self._streams and not _iterates_itself(loader) and loader.batch_size is not None:
            self._counting = copy.copy(loader)
            self._counting.collate_fn = CountingCollator(loader.collate_fn)
        self._check(loader)

    def join(self, flow: AccumulationState) -> None:
        """Belong to another loop of this process from now on."""
        self._strategy, self._flow = flow.strategy, flow

    def _check(self, loader: DataLoader[Any]) -> None:
        if isinstance(loader.sampler, DistributedSampler):
            raise ValueError(
                "a DataLoader has a DistributedSampler, but prepare() spreads its batches over the processes itself; "
                "give it shuffle=True instead"
            )
        if self._splits and (self._streams or not self.batch_rows or self.batch_rows % self._shares):
            what = "an iterable dataset" if self._streams else f"batches of {self.batch_rows}"
            whom = "processes" if self._devices == 1 else "devices"
            raise ValueError(
                f"split_batches=True cannot split {what} over {self._shares} {whom}; use a dataset with indices and "
                "a batch size that they divide"
            )

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # not set yet in a copy
            raise AttributeError(name)
        return member(self.loader, "DataLoader", name)

    # A DataLoader's own refuses to set attributes.
    __setattr__ = object.__setattr__  # type: ignore[assignment]

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_strategy", "_workers")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _strategy=state["_flow"].strategy, _workers=None)

    def __len__(self) -> int:
        """Return the number of batches per process in one pass."""
        batches, size = len(self.loader), 1 if self._splits else self._shares
        if self._is_uneven and not self._splits and not self._drops:
            return batches // size + (self._first < batches % size)
        return batches // size if self._drops else -(-batches // size)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        return self.passing()

    @property
    def batch_rows(self) -> int | None:
        """Number of samples in one batch of the DataLoader; None if unknown."""
        size: int | None = getattr(self.loader.batch_sampler, "batch_size", self.loader.batch_size)
        return size

    @property
    def total_batch_size(self) -> int | None:
        """Number of samples in one batch on all processes together; None if unknown."""
        rows = self.batch_rows
        return rows if rows is None or self._splits else rows * self._shares

    @property
    def total_dataset_length(self) -> int:
        """Number of samples in the dataset."""
        return len(self.loader.dataset)  # type: ignore[arg-type]

    @property
    def _drops(self) -> bool:
        return bool(getattr(self.loader.batch_sampler, "drop_last", self.loader.drop_last))

    @property
    def is_stream(self) -> bool:
        """Whether the dataset has no indices."""
        return self._streams

    @property
    def remainder(self) -> int:
        """Samples in the last batch of all processes; 0 for a whole batch, -1 if unknown or with `drop_last`."""
        total = self.total_batch_size
        return -1 if self._streams or self._drops or not total else self.total_dataset_length % total

    @property
    def _is_uneven(self) -> bool:
        return not self.even_batches and not self._streams and self._shares > 1

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the next pass; the pass that `load_state` found interrupted resumes if it has that number.

        Args:
            epoch: Number of the pass.
        """
        if self._stand is None or epoch != self._stand.epoch:
            self.epoch, self._position, self._stand = epoch, 0, None
        for each in self._samplers:
            set_epoch(each, epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return the position, the seed and the total batch size."""
        stand = self._stand or LoaderPosition(
            self.epoch, self._position, self._open, self._position > 0 and self.gave_last
        )
        return {**stand._asdict(), "seed": self._seed, "total_batch_size": self.total_batch_size}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the position; an interrupted pass resumes after its last batch in the next `for` loop.

        Args:
            state_dict: State from `state_dict()`.
        """
        stand = LoaderPosition(*(state_dict[name] for name in LoaderPosition._fields))
        before, now = state_dict["total_batch_size"], self.total_batch_size
        if before != now and before and now:
            if (stand.position * before) % now and not stand.complete:
                logger.warning("batches have %d samples now, %d before: some are seen again", now, before)
            stand = stand._replace(position=stand.position * before // now)
        self._seed, self._position = state_dict["seed"], 0
        self.epoch = stand.epoch + (stand.position > 0 and not stand.open)
        self._stand = stand if stand.position else None

    def passing(self, skip: int | None = None) -> Iterator[Any]:
        """Iterate over one pass: the next one, or the rest of the pass that `load_state` found interrupted.

        Args:
            skip: Number of batches to skip, counted from the beginning of the pass even where it resumes; None skips
                those that were read before the checkpoint.

        Yields:
            The batches of this process.
        """
        epoch, position = self._begin(skip)
        if skip is None and position:
            logger.info("a loader resumes after batch %d of epoch %d", position, epoch)
        self.epoch, self._position, self._open, self.gave_last = epoch, position, True, False
        dealt = self._streamed(epoch, position) if self._streams else self._read(epoch, position)
        self._flow.dispatch()
        self._flow.loaders.append(self)
        try:
            for each in self._strategy.prepare_loader(dealt) if self._placement else dealt:
                self._position += 1
                self.gave_last, self.rows, self.real = each.last, each.rows, each.real
                # No reference to the batch is kept, so that its memory is freed with the user's.
                batch, each.batch = [each.batch], None
                if self._placement:
                    batch = [self._strategy.to_device(batch.pop())]
                shape, trained = self._strategy.shapes.latest, self._flow.trained
                try:
                    yield batch.pop()
                finally:
                    # A batch without training before the next request counts as an evaluation batch. Whether
                    # gradients are enabled proves nothing: `torch.no_grad()` is often entered inside the loop.
                    if self._placement and shape is not None and self._flow.trained == trained:
                        self._strategy.shapes.mark_evaluation(shape)
                self._flow.dispatch()
            self.epoch, self._position = epoch + 1, 0
        finally:
            self._open = False
            self._flow.loaders.remove(self)

    def _begin(self, skip: int | None) -> tuple[int, int]:
        """Return the number of the pass to start or resume, and the position in it."""
        stand, self._stand = self._stand, None
        if stand is None:
            return self.epoch + (self._position > 0), skip or 0
        if skip is None:
            goes_on = stand.open
        elif stand.complete:
            goes_on = skip >= stand.position
        else:
            goes_on = stand.open or skip == stand.position
        if not goes_on:
            return stand.epoch + 1, skip or 0
        return stand.epoch, stand.position if skip is None else skip

    # Datasets with indices

    def _read(self, epoch: int, position: int) -> Iterator[Dealt]:
        jobs = self._jobs(epoch, position)
        if self.loader.num_workers:
            if self._workers is None:
                self._workers = WorkerReader(self.loader, self._strategy.device_info.pins_memory)
            return (Dealt(*each) for each in self._workers.read(jobs))
        if not hasattr(self._samplers[0], "__len__"):  # it may draw while its batches are read
            jobs = self._apart(jobs)
        return self._read_here(jobs)

    def _read_here(self, jobs: Iterator[BatchRequest]) -> Iterator[Dealt]:
        reader, device = Reader(self.loader), self._strategy.device
        if reader.collate is default_collate:
            reader.collate = default_collate_in_process
        for job in jobs:
            yield Dealt(*reader.read_apart(job, device))

    def _apart(self, items: Iterator[Any]) -> Iterator[Any]:
        """Keep the global generators unchanged while items are read in this process."""
        while True:
            with generators_kept(self._strategy.device):
                item = next(items, _END)
            if item is _END:
                return
            yield item

    def _jobs(self, epoch: int, position: int) -> Iterator[BatchRequest]:
        first: list[Any] = []
        rounds = _rounds(self._batches(epoch), 1 if self._splits else self._shares, self._drops)
        for number, (batches, ahead) in enumerate(rounds):
            if not first:
                first = [index for batch in batches for index in batch]
            if number < position:
                continue
            if self._is_uneven:
                indices, last = self._own(batches), not self._own(ahead)
                real = len(indices)
            else:
                indices, real = self._share(batches, cycle(first), not ahead)
                last = not ahead
            if not indices:
                return
            # The n-th global batch has the same seed with any number of processes.
            seed = mix(self._seed, epoch, number * self._shares + self._first)
            yield BatchRequest(epoch, seed, indices, real, last)

    def _own(self, batches: list[list[Any]]) -> list[Any]:
        """Return this process's part of a round without repeats, which may be empty."""
        end = self._first + self._devices
        if self._splits:
            part = (self.batch_rows or 0) // self._shares
            return batches[0][self._first * part : end * part] if batches else []
        return [index for batch in batches[self._first : end] for index in batch]

    def _batches(self, epoch: int) -> Iterator[list[Any]]:
        """Return the batches of all processes, from the user's samplers."""
        loader, seed = self.loader, mix(self._seed, epoch)
        sampler, in_batches = self._samplers[0], loader.batch_sampler is not None
        with generators_kept(self._strategy.device):
            self._seed_samplers(seed)
            for each in self._samplers:
                set_epoch(each, epoch)
            drawn: Iterable[Any] = list(sampler) if hasattr(sampler, "__len__") else sampler
        return (list(each) if in_batches else [each] for each in drawn)

    def _seed_samplers(self, seed: int) -> None:
        seed_generators(seed)
        for owner in (self.loader, *self._samplers):
            if isinstance(generator := getattr(owner, "generator", None), torch.Generator):
                generator.manual_seed(seed)

    def _share(self, batches: list[list[Any]], repeats: Iterator[Any], last: bool) -> tuple[list[Any], int]:
        """Return this process's part of a round and its number of non-repeats; `repeats` fill the last round."""
        if self._shares == 1:
            return batches[0], len(batches[0])
        rows, end = self.batch_rows or 0, self._first + self._devices
        if self._splits:
            batch = batches[0]
            part = -(-max(len(batch), rows if last else 0) // self._shares)
            filled = batch + list(islice(repeats, part * self._shares - len(batch)))
            share = filled[self._first * part : end * part]
            return share, min(max(len(batch) - self._first * part, 0), len(share))
        shares = [batches[number] if number < len(batches) else [] for number in range(self._shares)]
        wanted = [max(rows if last else 0, len(share), 1) - len(share) for share in shares]
        share = [index for each in shares[self._first : end] for index in each]
        before = sum(wanted[: self._first])  # repeats for the shares of lower ranks
        return share + list(islice(repeats, before, before + sum(wanted[self._first : end]))), len(share)

    # Iterable datasets

    def _streamed(self, epoch: int, position: int) -> Iterator[Dealt]:
        first: list[Any] = []
        shares = range(self._first, self._first + self._devices)
        rounds = _rounds(self._stream(epoch), self._shares, self._drops)
        for number, (batches, ahead) in enumerate(rounds):
            if not first and self._shares > 1:
                first = batches
            if number < position:
                continue
            is_even = len(batches) == self._shares and len({rows for rows, _ in batches}) == 1
            if self._shares > 1 and not is_even and (spread_out := spread(batches, self._shares, first)) is not None:
                rows, real, batch = spread_out.share(self._first, self._devices)
                yield Dealt(rows, real, not ahead, batch)
                continue
            own = [batches[share] if share < len(batches) else first[share % len(first)] for share in shares]
            sizes = [samples for samples, _ in own]
            real = sum(sizes[: max(len(batches) - self._first, 0)])
            yield Dealt(sum(sizes), real, not ahead, joined([batch for _, batch in own]))

    def _stream(self, epoch: int) -> Iterator[tuple[int, Any]]:
        """Yield the batches of all processes, each with its number of samples."""
        set_epoch(self.loader.dataset, epoch)
        with generators_kept(self._strategy.device):
            self._seed_samplers(mix(self._seed, epoch))
            batches = iter(self._counting)
        counted = self._counting is not self.loader
        for item in self._apart(self._seeded(batches, epoch)):
            yield item if counted else (row_count(item), item)

    def _seeded(self, batches: Iterator[Any], epoch: int) -> Iterator[Any]:
        number = 0
        while True:
            seed_generators(mix(self._seed, epoch, number))
            batch = next(batches, _END)
            if batch is _END:
                return
            yield batch
            number += 1


def _iterates_itself(loader: DataLoader[Any]) -> bool:
    """Return whether a DataLoader subclass has its own iteration, as torch_geometric's NeighborLoader does."""
    own, plain = type(loader), DataLoader
    return own.__iter__ is not plain.__iter__ or own._get_iterator is not plain._get_iterator


def _holds(things: tuple[Any, ...], thing: Any) -> bool:
    return any(each is thing for each in things)


def _rounds(batches: Iterator[Any], size: int, drops_last: bool) -> Iterator[tuple[list[Any], list[Any]]]:
    """Yield batches in rounds of `size`, each with the next round, which is empty after the last one."""
    ahead = _round(batches, size, drops_last)
    while ahead:
        current, ahead = ahead, _round(batches, size, drops_last)
        yield current, ahead


def _round(batches: Iterator[Any], size: int, drops_last: bool) -> list[Any]:
    found = list(islice(batches, size))
    return [] if drops_last and len(found) < size else found
