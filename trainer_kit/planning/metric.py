"""Check that an evaluation returns the metric that selects the best model."""

from __future__ import annotations

import copy
import dataclasses
import itertools
from contextlib import closing
from typing import Any, NamedTuple

from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from trainer_kit.data.build import make_evaluation_batches
from trainer_kit.data.map_loader import LoaderConfig
from trainer_kit.data.peek import read_ahead
from trainer_kit.data.source import is_named
from trainer_kit.loop.evaluation import Evaluator
from trainer_kit.loss.batch import Counts
from trainer_kit.loss.loss import Loss
from trainer_kit.loss.probe import LossProbe
from trainer_kit.memory.errors import first_line
from trainer_kit.memory.substitutes import Substitutes
from trainer_kit.planning.dry_strategy import Stage
from trainer_kit.planning.model import size_of
from trainer_kit.planning.planned_training import PlannedTraining
from trainer_kit.run import Run

_BATCHES, _SAMPLES = 2, 4
"""Number of batches in a trial evaluation, and samples of each."""

_CHEAP = 100_000_000
"""Largest number of parameters for a trial with a copy of the model."""


class MetricCheck(NamedTuple):
    """Finding about the metrics of evaluations; empty texts for none.

    Attributes:
        problem: Error that an evaluation would certainly raise.
        warning: Possible error.
    """

    problem: str = ""
    warning: str = ""


def check_metrics(subject: PlannedTraining, scheduler: Any, reading: LoaderConfig) -> MetricCheck:
    """Check that evaluations return the metric that the best checkpoint and the scheduler depend on.

    Args:
        subject: The training.
        scheduler: Scheduler of the run; None if unknown.
        reading: Settings of the loader.
    """
    run = subject.run
    by_metric = run.args.metric_for_best_model is not None or isinstance(scheduler, ReduceLROnPlateau)
    wanted = (run.args.metric_for_best_model or "eval_loss") if by_metric else None
    # The metrics of every evaluation, whatever the model.
    names = ("runtime", "samples_per_second", "steps_per_second", "loss")
    found = {f"{prefix}_{name}" for prefix in _datasets(run) for name in names}
    is_certain = wanted is None or wanted in found
    if subject.metrics or subject.compute_metrics is not None or not is_certain:  # the model may log the metric
        keeps_batches = subject.compute_metrics is not None and run.args.batch_eval_metrics
        if size_of(run.model) > _CHEAP or keeps_batches:
            sentence = f"whether an evaluation gives {wanted!r} is unknown until the first one"
            return MetricCheck(warning="" if is_certain else sentence)
        try:
            found = _tried(subject, reading)
        except Exception as error:  # the model, the dataset and the metrics are the user's own
            which = f"the first {_BATCHES * _SAMPLES} samples, tried with a copy of the model"
            return MetricCheck(warning=f"an evaluation of {which}, raised {first_line(error)}")
    if wanted is None or wanted in found:
        return MetricCheck()
    if subject.events.may_add_metrics:
        return MetricCheck(warning=f"{wanted!r} is not among what an evaluation gives; a callback has to add it")
    given = ", ".join(sorted(found))
    return MetricCheck(f"metric_for_best_model={wanted!r} is not among what an evaluation gives: {given}")


def _datasets(run: Run) -> dict[str, Any]:
    """Return the datasets of an evaluation by the prefix of their metrics."""
    datasets = run.eval_dataset
    if not is_named(datasets):
        return {"eval": datasets}
    return {f"eval_{name}": dataset for name, dataset in datasets.items()}


def _tried(subject: PlannedTraining, reading: LoaderConfig) -> set[str]:
    """Return the names of the metrics from a few batches, with copies of the model and the metrics."""
    run, found = subject.run, set()
    strategy = Stage(run.strategy, 1, run.strategy.device)
    args = dataclasses.replace(run.args, per_device_eval_batch_size=min(_SAMPLES, run.args.eval_batch_size))
    other: nn.Module = copy.deepcopy(run.model)
    stage = Run(args, strategy, other)
    probe = LossProbe(Loss.by_arguments(other, other, subject.compute_loss, args), strategy)
    functions = subject.compute_metrics, subject.preprocess_logits
    evaluator = Evaluator(stage, probe, copy.deepcopy(dict(subject.metrics)), *functions)
    with Substitutes(subject.compute_loss, run.model, copy.deepcopy).in_place():
        for prefix, dataset in _datasets(run).items():
            found |= {*evaluator(iter(_some_batches(stage, dataset, reading)), prefix).metrics}
    return found


def _some_batches(run: Run, dataset: Any, reading: LoaderConfig) -> list[tuple[Any, Counts, bool]]:
    def read(reading: LoaderConfig) -> list[tuple[Any, Counts, bool]]:
        batches: Any = make_evaluation_batches(run, dataset, reading)
        with closing(batches):  # it may have workers
            return list(itertools.islice(batches, _BATCHES))

    return read_ahead(dataset, reading, read)
