"""`BestMetric`: the metric by which the best checkpoint and a `ReduceLROnPlateau` schedule are judged."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.optim.lr_scheduler import ReduceLROnPlateau

from trainer_kit.checkpoint.manager import CheckpointManager


class BestMetric:
    """The metric of `args.metric_for_best_model`, from an evaluation or from what callbacks give to a record.

    Args:
        checkpoints: The checkpoint manager of the training.
    """

    def __init__(self, checkpoints: CheckpointManager) -> None:
        self.run, self._checkpoints = checkpoints.run, checkpoints
        self.is_chosen = self.run.args.metric_for_best_model is not None
        self.name = self.run.args.metric_for_best_model or "eval_loss"
        self._recorded: int | None = None  # step of the newest record
        self._of_callbacks: dict[str, Any] = {}  # what they gave to it
        self._records_have_it: bool | None = None  # None: not known yet

    def note_record(self, record: Mapping[str, Any], own: Mapping[str, Any]) -> None:
        """Keep what callbacks have given to a record.

        Args:
            record: The record.
            own: Its part that callbacks have not given.
        """
        self._recorded = self.run.state.step
        self._of_callbacks = {name: value for name, value in record.items() if name not in own}

    def forget_records(self) -> None:
        """Forget the newest record, of which other processes may not know."""
        self._recorded = self._records_have_it = None

    def is_missing(self, metrics: Mapping[str, Any]) -> bool:
        """Return whether the metric was chosen and an evaluation does not have it."""
        return self.is_chosen and self.name not in metrics

    @property
    def needs_record(self) -> bool:
        """Whether a record has to be made to find the metric among what callbacks give."""
        return self._recorded != self.run.state.step and self._records_have_it is not False

    def add_from_record(self, metrics: dict[str, Any]) -> None:
        """Add the metric to those of an evaluation, if callbacks have given it to the newest record."""
        given = [each for each in (self.name, self.name.removeprefix("eval_")) if each in self._of_callbacks]
        self._records_have_it = bool(given)
        if given:
            metrics[self.name] = self._of_callbacks[given[0]]

    def judge(self, metrics: Mapping[str, Any]) -> None:
        """Update the best checkpoint and a `ReduceLROnPlateau` schedule. Collective.

        Args:
            metrics: Those of an evaluation, with what callbacks have added.

        Raises:
            ValueError: If the metric is not among them.
        """
        run, by_metric = self.run, isinstance(self.run.lr_scheduler, ReduceLROnPlateau)
        if not (self.is_chosen or by_metric):
            return
        # A callback may have added it on the main process only, and without the prefix.
        here = metrics.get(self.name, metrics.get(self.name.removeprefix("eval_")))
        value = run.strategy.collectives.broadcast(here)
        if not isinstance(value, (int, float)):
            if value is not None:
                raise ValueError(f"metric_for_best_model={self.name!r} is a {type(value).__name__}; name a number")
            raise ValueError(
                f"metric_for_best_model={self.name!r} is not among the numbers that evaluation and callbacks give: "
                f"{', '.join(metrics)}"
            )
        if not run.state.step:  # the evaluation before the first step shows no progress
            return
        if self.is_chosen:
            self._checkpoints.record_metric(float(value))
        if by_metric:
            run.lr_scheduler.step(value)
