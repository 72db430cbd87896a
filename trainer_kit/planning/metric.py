"""Check that an evaluation returns the metric that selects the best model."""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Callable, Mapping
from contextlib import closing
from typing import Any

from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from trainer_kit.data.build import make_evaluation_batches
from trainer_kit.data.map_loader import LoaderConfig
from trainer_kit.data.peek import read_ahead
from trainer_kit.loop.evaluation import EvalPrediction, Evaluator
from trainer_kit.loop.metrics import Metric
from trainer_kit.loss.batch import Counts
from trainer_kit.loss.loss import ComputeLoss, Loss
from trainer_kit.loss.probe import LossProbe
from trainer_kit.memory.errors import first_line
from trainer_kit.planning.dry_strategy import Stage
from trainer_kit.planning.model import size_of
from trainer_kit.run import Run

_BATCHES, _SAMPLES = 2, 4
"""Number of batches in a trial evaluation, and samples of each."""

_CHEAP = 100_000_000
"""Largest number of parameters for a trial with a copy of the model."""


class Evaluation:
    """Evaluation of a run, as far as it is known in advance.

    Args:
        run: The run.
        metrics: Streaming metrics by name.
        compute_metrics: The user's metrics function; None for none.
        compute_loss: The user's loss function; None for the model's own loss.
        scheduler: Scheduler of the run, which may depend on a metric too; None if unknown.
        callbacks_may_add: Whether callbacks may add their own metrics.
    """

    def __init__(
        self,
        run: Run,
        metrics: Mapping[str, Metric],
        compute_metrics: Callable[[EvalPrediction], Mapping[str, Any]] | None,
        compute_loss: ComputeLoss | None,
        scheduler: Any,
        callbacks_may_add: bool,
    ) -> None:
        self.run = run
        self.metrics = metrics
        self.compute_metrics = compute_metrics
        self.compute_loss = compute_loss
        self.callbacks_may_add = callbacks_may_add
        by_metric = run.args.metric_for_best_model is not None or isinstance(scheduler, ReduceLROnPlateau)
        self.wanted = (run.args.metric_for_best_model or "eval_loss") if by_metric else None
        self.warnings: list[str] = []

    def problems(self, reading: LoaderConfig) -> list[str]:
        """Return the errors that an evaluation would certainly raise; uncertain ones are added to `warnings`.

        Args:
            reading: Settings of the loader.
        """
        run, wanted, certain = self.run, self.wanted, self._certain()
        if not self.metrics and self.compute_metrics is None:
            found = certain
        elif size_of(run.model) > _CHEAP:
            if wanted is not None and wanted not in certain:
                self.warnings.append(f"whether an evaluation gives {wanted!r} is unknown until the first one")
            return []
        else:
            try:
                found = self._tried(reading)
            except Exception as error:  # the model, the dataset and the metrics are the user's own
                self.warnings.append(
                    f"an evaluation of the first {_BATCHES * _SAMPLES} samples, tried with a copy of the model, raised "
                    f"{first_line(error)}"
                )
                return []
        if wanted is None or wanted in found:
            return []
        if self.callbacks_may_add:
            self.warnings.append(f"{wanted!r} is not among what an evaluation gives; a callback has to add it")
            return []
        return [f"metric_for_best_model={wanted!r} is not among what an evaluation gives: {', '.join(sorted(found))}"]

    def _prefixes(self) -> list[str]:
        datasets = self.run.eval_dataset
        return [f"eval_{name}" for name in datasets] if isinstance(datasets, Mapping) else ["eval"]

    def _certain(self) -> set[str]:
        """Return the metrics that every evaluation returns, whatever the model: its times and the loss."""
        names = ["runtime", "samples_per_second", "steps_per_second", "loss"]
        return {f"{prefix}_{name}" for prefix in self._prefixes() for name in names}

    def _tried(self, reading: LoaderConfig) -> set[str]:
        """Return the names of the metrics from a few batches, with copies of the model and the metrics."""
        run, found = self.run, set()
        datasets = run.eval_dataset if isinstance(run.eval_dataset, Mapping) else {"": run.eval_dataset}
        strategy = Stage(run.strategy, 1, run.strategy.device)
        args = dataclasses.replace(run.args, per_device_eval_batch_size=min(_SAMPLES, run.args.eval_batch_size))
        other: nn.Module = copy.deepcopy(run.model)
        stage = Run(args, strategy, other)
        inspection = LossProbe(Loss(other, other, self.compute_loss), strategy)
        evaluator = Evaluator(stage, inspection, copy.deepcopy(dict(self.metrics)), self.compute_metrics)
        for prefix, dataset in zip(self._prefixes(), datasets.values(), strict=True):
            batches = _some_batches(stage, dataset, reading)
            found |= {*evaluator(iter(batches), prefix).metrics}
        return found


def _some_batches(run: Run, dataset: Any, reading: LoaderConfig) -> list[tuple[Any, Counts]]:
    def read(reading: LoaderConfig) -> list[tuple[Any, Counts]]:
        batches: Any = make_evaluation_batches(run, dataset, reading)
        with closing(batches):  # it may have workers
            return list(itertools.islice(batches, _BATCHES))

    return read_ahead(dataset, reading, read)
