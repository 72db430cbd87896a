"""Loaders made from a run's arguments and datasets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch.utils.data import DataLoader

from trainer_kit.config.arguments import TrainingArguments
from trainer_kit.data.collate import Collator
from trainer_kit.data.iterable_loader import StreamLoader, stream_evaluation_batches
from trainer_kit.data.map_loader import LoaderConfig, TrainLoader, evaluation_batches, is_iterable
from trainer_kit.data.sampling import Layout
from trainer_kit.loss.batch import Counts
from trainer_kit.run import Run
from trainer_kit.strategies.base import Strategy


def make_reading(args: TrainingArguments, strategy: Strategy, collate: Collator) -> LoaderConfig:
    """Return the loader configuration of a run."""
    pin_memory = args.dataloader_pin_memory and strategy.device_info.pins_memory
    return LoaderConfig(collate, args.seed, args.dataloader_num_workers, pin_memory, args.dataloader_timeout)


def make_train_loader(run: Run, reading: LoaderConfig) -> TrainLoader | StreamLoader:
    """Make the loader of the training batches.

    Raises:
        TypeError: If `run.train_dataset` is a DataLoader or a dict of datasets.
        ValueError: If there is no dataset, the dataset is empty, or the arguments do not fit it.
    """
    args, dataset = run.args, run.train_dataset
    if dataset is None:
        raise ValueError("train() needs train_dataset")
    _check_dataset("train_dataset", dataset)
    layout = _layout(run.strategy, args.per_device_train_batch_size, args.gradient_accumulation_steps)
    if not is_iterable(dataset):
        return TrainLoader(dataset, layout, reading, args.dataloader_drop_last, args.group_by_length)
    if args.group_by_length:
        raise ValueError("group_by_length=True needs a train_dataset with a length and __getitem__")
    if args.max_steps < 0 and not hasattr(dataset, "__len__"):
        raise ValueError("train_dataset has no length, so that epochs cannot be counted; set max_steps")
    return StreamLoader(dataset, layout, reading, args.dataloader_drop_last)


def make_evaluation_batches(
    run: Run, dataset: Any, reading: LoaderConfig, size: int | None = None
) -> Iterator[tuple[Any, Counts]]:
    """Return the batches of an evaluation with their counts.

    Args:
        run: The run.
        dataset: The dataset to evaluate, map-style or iterable.
        reading: How samples are read.
        size: Samples of a batch on each device; None: `args.eval_batch_size`.

    Raises:
        TypeError: If `dataset` is a DataLoader or a dict of datasets.
    """
    _check_dataset("the dataset to evaluate", dataset)
    layout = _layout(run.strategy, size or run.args.eval_batch_size)
    make = stream_evaluation_batches if is_iterable(dataset) else evaluation_batches
    return make(dataset, layout, reading)


def _check_dataset(role: str, dataset: Any) -> None:
    if isinstance(dataset, DataLoader):
        raise TypeError(f"{role} is a DataLoader; give its dataset, and its batch size and workers in the arguments")
    if isinstance(dataset, Mapping):
        raise TypeError(f"{role} is a {type(dataset).__name__} of {', '.join(map(str, dataset))}; give one dataset")


def _layout(strategy: Strategy, batch_size: int, accumulation: int = 1) -> Layout:
    collectives = strategy.collectives
    return Layout(batch_size * strategy.devices, accumulation, collectives.readers, collectives.reader)
