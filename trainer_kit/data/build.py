"""Loaders made from a run's arguments and data."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader

from trainer_kit.config.arguments import TrainingArguments
from trainer_kit.data.collate import (
    OTHER_LABELS,
    Collator,
    default_collator,
    stack,
    stack_with_labels,
    warn_of_ready_batches,
)
from trainer_kit.data.columns import without_unused_columns
from trainer_kit.data.iterable_loader import StreamLoader
from trainer_kit.data.map_loader import LoaderConfig, TrainLoader, evaluation_batches
from trainer_kit.data.sampled_loader import SampledLoader
from trainer_kit.data.sampler_order import SamplerOrder, copied, evaluation_plan
from trainer_kit.data.sampling import Layout, kept_layout
from trainer_kit.data.source import DataSource, check_is_one, data_source, is_named, order_facts
from trainer_kit.data.stream_evaluation import StreamEvaluation
from trainer_kit.loss.batch import Counts
from trainer_kit.loss.loss import ComputeLoss, columns_of, takes_column
from trainer_kit.run import Run
from trainer_kit.strategies.base import Strategy

logger = logging.getLogger("trainer_kit")


def make_collators(
    run: Run, train: Collator | None, evaluation: Collator | None, compute_loss: ComputeLoss | None
) -> tuple[Collator, Collator]:
    """Return the collators of training and of evaluation.

    Args:
        run: The run.
        train: The user's collator; None: the default one.
        evaluation: The user's collator of evaluation; None: that of training.
        compute_loss: The user's loss function, which may read any column; None: the model's own loss.

    Raises:
        TypeError: If the collator is given in place of the dataset.
        ValueError: If padding options are set without a tokenizer to pad with, or a collator is given for a DataLoader.
    """
    args, model = run.args, run.model
    if callable(run.train_dataset) and not {"__iter__", "__getitem__"} & {*dir(run.train_dataset)}:
        kind = type(run.train_dataset).__name__
        raise TypeError(f"train_dataset is a {kind} without samples; give a collator by name, as data_collator=")
    for each in run.eval_dataset.values() if is_named(run.eval_dataset) else [run.eval_dataset]:
        check_is_one("eval_dataset", each)
    for role, data, collate in (("", run.train_dataset, train), ("eval_", run.eval_dataset, evaluation)):
        if collate is not None and isinstance(data, DataLoader) and data.collate_fn is not collate:
            raise ValueError(
                f"{role}data_collator has no effect, since {role or 'train_'}dataset is a DataLoader, whose collate_fn "
                "makes the batches; give it to the DataLoader"
            )
    takes_mask = compute_loss is not None or takes_column(model, "attention_mask")
    train = train or default_collator(
        run.processing_class, args.pad_to_multiple_of, takes_mask, args.pad_to_lengths, run.strategy.static_shapes
    )
    if train is stack and compute_loss is None and _calls_labels_otherwise(model):
        train = stack_with_labels
    if compute_loss is not None or not args.remove_unused_columns:
        return train, evaluation or train
    train = without_unused_columns(train, model)
    return train, train if evaluation is None else without_unused_columns(evaluation, model)


def _calls_labels_otherwise(model: torch.nn.Module) -> bool:
    """Return whether a model takes `labels`, and none of the names that datasets have for them."""
    names = columns_of(model, even_with_keywords=True) or ()
    return "labels" in names and not any(name in names for name in OTHER_LABELS)


def make_reading(args: TrainingArguments, strategy: Strategy, collate: Collator) -> LoaderConfig:
    """Return the loader configuration of a run."""
    pin_memory = args.dataloader_pin_memory and strategy.device_info.pins_memory
    return LoaderConfig(
        collate,
        args.seed,
        args.dataloader_num_workers,
        pin_memory,
        args.dataloader_timeout,
        prefetch_factor=args.dataloader_prefetch_factor,
        multiprocessing_context=args.dataloader_multiprocessing_context,
    )


def reading_of(source: DataSource, reading: LoaderConfig) -> LoaderConfig:
    """Return the configuration with the settings of the source; ready batches are read in this process."""
    if source.is_ready:
        return dataclasses.replace(reading, workers=0)
    settings = ("collate", "workers", "timeout", "worker_init_fn", "prefetch_factor", "multiprocessing_context")
    own: dict[str, Any] = {name: value for name in settings if (value := getattr(source, name)) is not None}
    return dataclasses.replace(reading, **own)


def make_train_loader(
    run: Run, reading: LoaderConfig, trains: bool = True, saved: Mapping[str, Any] | None = None
) -> TrainLoader | StreamLoader:
    """Make the loader of the training batches.

    Args:
        run: The run.
        reading: How samples are read.
        trains: Whether to train on the batches; otherwise a copy of the sampler draws the orders.
        saved: The `RunLength` state of the checkpoint to resume from; None without one.

    Raises:
        TypeError: If `run.train_dataset` is a dict of datasets.
        ValueError: If there is no dataset, the dataset is empty, or the arguments do not fit it.
    """
    args = run.args
    if run.train_dataset is None:
        raise ValueError("train() needs train_dataset")
    source = data_source("train_dataset", run.train_dataset, run.train_sampler)
    reading = reading_of(source, reading)
    layout = _layout(run.strategy, source, args.per_device_train_batch_size, args.gradient_accumulation_steps)
    saved = saved if args.on_resize == "keep" else None
    order, drop_last = order_facts(source, args).values()
    given, size = args.per_device_train_batch_size, source.batch_size
    if size is not None and given not in (size, type(args).per_device_train_batch_size):
        logger.warning(
            "per_device_train_batch_size=%d has no effect: train_dataset is a DataLoader, with batches of %d",
            given,
            size,
        )
    if args.group_by_length and not order.startswith("grouped"):
        raise ValueError(
            "group_by_length=True needs a train_dataset with a length and __getitem__, shuffled, and no sampler; set "
            "it to False"
        )
    if source.sampler is not None:
        sampler = source.sampler if trains else copied(source.sampler)
        own = SamplerOrder(sampler, args.seed, source.in_batches, warns=layout.reader == 0)
        return SampledLoader(source.dataset, layout, reading, own, drop_last, saved)
    layout = kept_layout(layout, saved)
    if not source.is_iterable:
        if type(source.dataset) in (list, tuple) and source.dataset and layout.reader == 0:
            warn_of_ready_batches("train_dataset", source.dataset[0], reading.collate)
        names = getattr(run.processing_class, "model_input_names", None) or ["input_ids"]
        column = "input_ids" if "input_ids" in names else names[0]
        grouped_column = column if args.group_by_length else None
        return TrainLoader(source.dataset, layout, reading, drop_last, grouped_column, order != "dataset")
    if args.max_steps < 0 and source.length is None:
        raise ValueError("train_dataset has no length, so that epochs cannot be counted; set max_steps")
    return StreamLoader(source.dataset, layout, reading, drop_last)


def make_evaluation_batches(
    run: Run, dataset: Any, reading: LoaderConfig, size: int | None = None
) -> Iterable[tuple[Any, Counts, bool]]:
    """Return the batches of an evaluation with their counts, and whether each is a dummy batch (see `EvalBatch`).

    Args:
        run: The run.
        dataset: The dataset or loader to evaluate.
        reading: How samples are read.
        size: Samples of a batch on each device; None: `args.eval_batch_size`.

    Raises:
        TypeError: If `dataset` is a dict of datasets.
    """
    source = data_source("the dataset to evaluate", dataset)
    reading = reading_of(source, reading)
    layout = _layout(run.strategy, source, size or run.args.eval_batch_size)
    if run.state.eval_batch is not None and not source.is_iterable:  # batches of a loader's own size are cut
        layout = layout._replace(limit=run.state.eval_batch * run.strategy.devices)
    if source.is_iterable:
        return StreamEvaluation(source.dataset, layout, reading)
    plan = None
    if source.sampler is not None:
        order = SamplerOrder(source.sampler, run.args.seed, source.in_batches).draw(0)
        run.strategy.collectives.check_same_on_all_ranks({"the order of the evaluation's sampler": order.fingerprint})
        plan = evaluation_plan(order, layout)
    computes_here = run.strategy.device.type == "cpu"
    return evaluation_batches(source.dataset, layout, reading, plan, reads_several=computes_here)


def _layout(strategy: Strategy, source: DataSource, batch_size: int, accumulation: int = 1) -> Layout:
    collectives = strategy.collectives
    if source.is_ready:
        return Layout(1, accumulation, collectives.readers, collectives.reader, ready_size=1, has_own_batches=True)
    size = batch_size if source.batch_size is None else source.batch_size
    devices = strategy.devices
    return Layout(size * devices, accumulation, collectives.readers, collectives.reader, devices=devices)
