"""The forms of data that a run accepts: datasets, samplers, DataLoaders and ready batches."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, cast

import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from trainer_kit.config.arguments import TrainingArguments
from trainer_kit.data.collate import Collator
from trainer_kit.data.sampling import is_small, mix
from trainer_kit.state import is_stateful

_BY_COLUMN = {
    ("pandas", "DataFrame"): 'df.to_dict("records") or datasets.Dataset.from_pandas(df)',
    ("pyarrow", "Table"): "table.to_pylist() or datasets.Dataset(table)",
}
"""Tables whose index is a column, and what to give in their place."""


class ReadyBatches:
    """Batches that come as they are: the Trainer collates nothing and takes each as one micro-batch.

    Give it as `train_dataset` or `eval_dataset`. An epoch is one pass over `batches`. Every process iterates over all
    of them and takes its share in turn.

    Args:
        batches: Any iterable of batches: a loader, a list, an object with `__iter__`, or an iterator, which can be read
            only once. With `state_dict` and `load_state_dict`, a resume continues from its state; otherwise it reads
            the epoch's batches again. `set_epoch`, if there is one, is called before each epoch.
    """

    def __new__(cls, batches: Iterable[Any]) -> ReadyBatches:
        return super().__new__(_StatefulBatches if is_stateful(batches) else cls)

    def __init__(self, batches: Iterable[Any]) -> None:
        if not hasattr(batches, "__iter__"):
            raise TypeError(f"ReadyBatches needs an iterable of batches; this is a {type(batches).__name__}")
        self.batches: Any = batches

    def __getnewargs__(self) -> tuple[Any]:
        return (self.batches,)  # for pickle and copy

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


class _StatefulBatches(ReadyBatches):
    """Ready batches whose source has a state.

    None stands for the start of a DataLoader's pass, which `iter` begins: its own state there would hold that of its
    generators, and so repeat the order of an earlier epoch.
    """

    _is_started = False

    def __iter__(self) -> Iterator[Any]:
        self._is_started = True
        return iter(self.batches)

    def state_dict(self) -> dict[str, Any]:
        begins = isinstance(self.batches, DataLoader) and not self._is_started
        return {"batches": None if begins else self.batches.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._is_started = state_dict["batches"] is not None
        if self._is_started:
            self.batches.load_state_dict(state_dict["batches"])


@dataclasses.dataclass(frozen=True, eq=False)
class DataSource:
    """Data as the loaders read it. A value of None leaves a setting to the arguments.

    Attributes:
        dataset: A map-style or iterable dataset, or `ReadyBatches`.
        sampler: Yields the indices of an epoch, or lists of indices, one for each batch; None: the arguments' order.
        in_batches: Whether the sampler yields lists; None: as the first that it yields.
        shuffle: Whether the order is shuffled.
        batch_size: Samples of one micro-batch on one process.
        drop_last: Whether to drop an epoch's last batches that are not full.
        collate: Makes a batch from a list of samples.
        workers: Number of worker processes.
        timeout: Seconds that workers may take for a batch.
        worker_init_fn: Called in each worker with its number.
        prefetch_factor: Batches that each worker reads ahead.
        multiprocessing_context: How workers are started.
    """

    dataset: Any
    sampler: Any = None
    in_batches: bool | None = None
    shuffle: bool | None = None
    batch_size: int | None = None
    drop_last: bool | None = None
    collate: Collator | None = None
    workers: int | None = None
    timeout: float | None = None
    worker_init_fn: Callable[[int], Any] | None = None
    prefetch_factor: int | None = None
    multiprocessing_context: Any = None

    @property
    def is_ready(self) -> bool:
        """Whether the dataset yields batches instead of samples."""
        return isinstance(self.dataset, ReadyBatches)

    @property
    def is_iterable(self) -> bool:
        """Whether the dataset can only be read from its start: it has no `__getitem__` or no length."""
        dataset = self.dataset
        return isinstance(dataset, (IterableDataset, ReadyBatches)) or not (
            hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
        )

    @property
    def is_read_once(self) -> bool:
        """Whether the dataset is an iterator, which ends with its first pass."""
        return isinstance(self.dataset.batches if self.is_ready else self.dataset, Iterator)

    @property
    def length(self) -> int | None:
        """Number of samples, or of batches if they are ready; None if unknown."""
        loader = self.dataset.batches if self.is_ready else None
        try:
            if isinstance(loader, DataLoader) and _is_shared_by_workers(loader):
                # Its own length is that of batches of one worker.
                sizes = len(cast(Any, loader.dataset)), loader.batch_size or 1, loader.num_workers, loader.drop_last
                full, tail = batches_of(*sizes)
                return full + len(tail)
            return len(self.dataset)
        except (TypeError, ValueError):  # it has none, or does not know it
            return None


def data_source(role: str, data: Any, sampler: Any = None) -> DataSource:
    """Return the source that a user's dataset or loader stands for.

    A DataLoader of a map-style dataset is taken apart into dataset, sampler, batch size and collator, so that its
    position is a number of samples and every process reads only its own. One with an iteration of its own, or of an
    iterable dataset, yields ready batches.

    Args:
        role: The argument's name, for errors.
        data: The dataset or loader.
        sampler: A sampler given apart from it; None: none.

    Raises:
        TypeError: If `data` is a dict or list of datasets, a DataModule, or a table that is indexed by column.
        ValueError: If a sampler is given for data that has an order of its own, or the data is divided by process.
    """
    if isinstance(data, ReadyBatches) and isinstance(data.batches, DataLoader):
        data = data.batches
    check_is_one(role, data)
    if isinstance(data, DataLoader):
        source = _apart(data) if _can_be_taken_apart(data) else DataSource(ReadyBatches(data))
    elif is_named(data):
        raise TypeError(f"{role} is a {type(data).__name__} of {', '.join(map(str, data))}; give one dataset")
    elif (table := (type(data).__module__.partition(".")[0], type(data).__name__)) in _BY_COLUMN:
        raise TypeError(
            f"{role} is a {table[1]} of {table[0]}, which is indexed by column, not by sample; give {_BY_COLUMN[table]}"
        )
    else:
        source = DataSource(data)
    if sampler is None:
        return source
    if source.is_iterable or isinstance(data, DataLoader):
        raise ValueError(
            f"train_sampler needs a train_dataset with a length and __getitem__; this {type(data).__name__} has an "
            "order of its own"
        )
    return dataclasses.replace(source, **_order_of(sampler, source.dataset))


def check_is_one(role: str, data: Any) -> None:
    """Check that data is not a collection of loaders, as other libraries take them.

    Args:
        role: The argument's name, for errors.
        data: The dataset or loader.

    Raises:
        TypeError: If it is a list of DataLoaders, or an object that makes some.
    """
    several = "give one loader, or a dict of loaders by name as eval_dataset"
    if type(data) in (list, tuple) and data and isinstance(data[0], DataLoader):
        raise TypeError(f"{role} is a {type(data).__name__} of DataLoaders; {several}")
    if any(each.__name__ == "PyDataset" and each.__module__.startswith("keras") for each in type(data).__mro__):
        raise TypeError(
            f"{role} is a PyDataset of keras, which has batches in place of samples; give ReadyBatches(batches) with "
            "tensors, or a dataset of samples"
        )
    if type(data).__name__ == "CombinedLoader":
        raise TypeError(f"{role} is a CombinedLoader, which is read in modes of Lightning's; {several}")
    makers = [name for name in ("train_dataloader", "val_dataloader") if callable(getattr(data, name, None))]
    if makers and not {"__iter__", "__getitem__"} & {*dir(data)}:
        raise TypeError(
            f"{role} is a {type(data).__name__}, which makes loaders; give what its {' or '.join(makers)} returns "
            "after prepare_data() and setup('fit')"
        )


def is_named(data: Any) -> bool:
    """Return whether data is a dict of datasets by name, and not a mapping that is a dataset itself."""
    if isinstance(data, Dataset) or hasattr(data, "batch_size"):  # a TensorDict is a dataset of its rows
        return False
    return isinstance(data, dict) or (isinstance(data, Mapping) and all(isinstance(name, str) for name in data))


def data_length(data: Any) -> int | None:
    """Return the number of samples of a dataset, or of batches that are ready; None if unknown, or without data."""
    return None if data is None or is_named(data) else data_source("the dataset", data).length


def order_facts(source: DataSource, args: TrainingArguments) -> dict[str, Any]:
    """Return the kind of order that a run's samples have, and whether an epoch drops its last batches.

    A checkpoint holds both, since they may come from the arguments or from a loader.
    """
    if source.is_iterable:
        order = "stream"
    elif source.sampler is not None:
        order = "sampler"
    elif not (args.shuffle if source.shuffle is None else source.shuffle):
        order = "dataset"
    else:
        groups = "grouped in four" if source.length is not None and is_small(source.length) else "grouped"
        order = groups if args.group_by_length else "shuffled"
    return {"order": order, "drop_last": args.dataloader_drop_last if source.drop_last is None else source.drop_last}


def _can_be_taken_apart(loader: DataLoader[Any]) -> bool:
    own, plain = type(loader), DataLoader
    is_plain = own.__iter__ is plain.__iter__ and own._get_iterator is plain._get_iterator
    # torchdata's StatefulDataLoader reads as a DataLoader does; a dataset with a state needs its own iteration.
    is_torchdata = own.__module__.startswith("torchdata.") and not is_stateful(loader.dataset)
    return (
        (is_plain or is_torchdata) and loader.batch_sampler is not None and not DataSource(loader.dataset).is_iterable
    )


def _apart(loader: DataLoader[Any]) -> DataSource:
    order: dict[str, Any]
    if loader.batch_size is None:
        order = {"sampler": _of_all_processes(loader.batch_sampler), "in_batches": True}
    else:
        order = _order_of(loader.sampler, loader.dataset, loader.generator)
        order |= {"batch_size": loader.batch_size, "drop_last": loader.drop_last, "in_batches": False}
    return DataSource(
        loader.dataset,
        collate=loader.collate_fn,
        workers=loader.num_workers,
        timeout=loader.timeout or None,
        worker_init_fn=loader.worker_init_fn,
        prefetch_factor=loader.prefetch_factor,
        multiprocessing_context=loader.multiprocessing_context,
        **order,
    )


def _order_of(sampler: Any, dataset: Any, generator: torch.Generator | None = None) -> dict[str, Any]:
    """Return the order that a sampler of indices stands for: one of the arguments' own where it is the same."""
    kind, length = type(sampler), len(dataset)
    if kind is SequentialSampler and len(sampler.data_source) == length:
        return {"shuffle": False}
    is_random = kind.__name__ == "RandomSampler" and kind.__module__.startswith(("torch.", "torchdata."))
    # torchdata's sampler seeds a generator of its own if it is given none.
    is_seeded = generator is not None or (kind is RandomSampler and sampler.generator is not None)
    is_whole = is_random and not sampler.replacement and len(sampler.data_source) == sampler.num_samples == length
    if is_whole and not is_seeded:
        return {"shuffle": True}
    return {"sampler": _of_all_processes(sampler)}


def _of_all_processes(sampler: Any) -> Any:
    """Return a sampler of the samples of all processes, which the Trainer divides itself."""
    if type(sampler) is DistributedSampler:
        return DistributedSampler(sampler.dataset, 1, 0, sampler.shuffle, sampler.seed, sampler.drop_last)
    if type(sampler) is BatchSampler and (inner := _of_all_processes(sampler.sampler)) is not sampler.sampler:
        return BatchSampler(inner, sampler.batch_size, sampler.drop_last)
    for part in parts_of(sampler):
        if isinstance(replicas := getattr(part, "num_replicas", None), int) and replicas > 1:
            raise ValueError(
                f"the {type(part).__name__} gives each of {replicas} processes a share of the samples, but the Trainer "
                "divides them itself; give a sampler of all samples, such as its one with num_replicas=1 and rank=0"
            )
    return sampler


def begin_epoch(reader: Any, epoch: int) -> None:
    """Call `set_epoch` of a loader or sampler and of its parts, and seed their own generators for the epoch.

    In epoch 0 a generator has the seed that the user gave it last. Later epochs have seeds that follow from that one,
    so that an epoch's order does not depend on the epochs before it.

    Args:
        reader: A loader, a sampler or any other iterable.
        epoch: Number of the epoch, from 0; -1 for an evaluation, which is always the same.
    """
    for part in parts_of(reader):
        if hasattr(part, "set_epoch") and epoch >= 0:
            part.set_epoch(epoch)
        if isinstance(generator := getattr(part, "generator", None), torch.Generator):
            _seed(generator, epoch)


def is_loader(dataset: Any) -> bool:
    """Return whether a dataset is the ready batches of a DataLoader."""
    return isinstance(dataset, ReadyBatches) and isinstance(dataset.batches, DataLoader)


def seeds_epochs(dataset: Any) -> bool:
    """Return whether `begin_epoch` decides the order of ready batches: those of a DataLoader with a sampler."""
    return is_loader(dataset) and not DataSource(dataset.batches.dataset).is_iterable


def parts_of(reader: Any) -> Iterator[Any]:
    """Yield a loader or sampler, and those inside it."""
    waiting, known = [reader], set()
    while waiting:
        part = waiting.pop()
        if part is None or id(part) in known:
            continue
        known.add(id(part))
        yield part
        waiting += [getattr(part, name, None) for name in ("batch_sampler", "sampler")]
        if isinstance(part, DataLoader):
            waiting.append(part.dataset)


def _seed(generator: torch.Generator, epoch: int) -> None:
    first, latest = _seeds.get(generator, (0, None))
    if (now := generator.initial_seed()) != latest:  # the user has seeded it
        first = now
    seed = mix(first, epoch) if epoch > 0 else first
    _seeds[generator] = first, seed
    generator.manual_seed(seed)


_seeds: dict[torch.Generator, tuple[int, int]] = {}
"""The seed that the user gave each generator, and the one that it was last given here. Not each release of torch has
weak references to generators; they are few and small."""


def _is_shared_by_workers(loader: DataLoader[Any]) -> bool:
    if not isinstance(loader.dataset, IterableDataset) or type(loader).__len__ is not DataLoader.__len__:
        return False
    return loader.num_workers > 1 and loader.batch_size is not None


def batches_of(length: int, size: int, readers: int, drop_last: bool) -> tuple[int, list[int]]:
    """Return how many full batches an epoch of this length begins with, and the sizes of the batches after them.

    The readers take turns. Each has its share of the samples, and its last batch may not be full.
    """
    least, more = divmod(length, readers)
    rounds = least // size  # turns in which every reader has a full batch
    shares = [least + (reader < more) - rounds * size for reader in range(readers)]
    tail = [min(size, share - start) for start in (0, size) for share in shares]
    return rounds * readers, [each for each in tail if each == size or (each > 0 and not drop_last)]
