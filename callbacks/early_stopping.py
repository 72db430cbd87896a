"""`EarlyStopping`: ends training when evaluations no longer improve."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from trainer_kit.callback import Callback
from trainer_kit.utils.user_warnings import warn

if TYPE_CHECKING:
    from trainer_kit.run import Run

_logger = logging.getLogger("trainer_kit")


class EarlyStopping(Callback):
    """End training after `patience` evaluations in a row without an improvement.

    Checkpoints keep the count. A metric of NaN is not an improvement. This callback is called after the writers, so
    that it sees the metrics that all others add, and its log line follows theirs.

    Args:
        patience: Evaluations without an improvement after which training ends.
        min_delta: Change of the metric since the last improvement that an improvement must exceed.
        metric: Name of the metric, with or without `eval_`; None: `args.metric_for_best_model`, else "eval_loss".
        greater_is_better: Whether a greater metric is better; None: as `args.greater_is_better` says if the metric is
            `args.metric_for_best_model`, else true unless the name ends with "loss".

    Raises:
        ValueError: If `patience` is below 1 or `min_delta` is negative; in training, if evaluations have no such
            metric or `args.eval_strategy` is "no".
    """

    priority = 150

    def __init__(
        self,
        patience: int = 3,
        min_delta: float = 0.0,
        metric: str | None = None,
        greater_is_better: bool | None = None,
    ) -> None:
        if patience < 1:
            raise ValueError(f"EarlyStopping(patience={patience!r}) must be a whole number of at least 1")
        if not min_delta >= 0:
            raise ValueError(f"EarlyStopping(min_delta={min_delta!r}) must be a number of at least 0")
        self.patience = patience
        self.min_delta = min_delta
        self.metric = metric
        self.greater_is_better = greater_is_better
        self.best: float | None = None
        self.failures = 0
        self._judged_by: list[str | bool] | None = None  # of `best`: its metric, and whether a greater one is better

    def on_train_begin(self, run: Run) -> None:
        if run.args.eval_strategy == "no":
            raise ValueError("EarlyStopping needs evaluations, but eval_strategy='no'; set it to 'steps' or 'epoch'")
        name, best = self._metric(run), run.args.metric_for_best_model
        if run.args.load_best_model_at_end and name != best:
            warn(
                f"EarlyStopping watches {name}, but load_best_model_at_end=True loads the best model by {best}; set "
                f"metric_for_best_model={name!r} for the one by {name}"
            )
        judged_by: list[str | bool] = [name, self._is_greater_better(run, name)]
        if self._judged_by not in (None, judged_by):  # resumed with another metric
            self.best, self.failures = None, 0
        self._judged_by = judged_by
        if self.failures >= self.patience:  # resumed from the checkpoint of a run that ended early
            run.requests.stop = True

    def on_evaluate(self, run: Run, metrics: dict[str, Any]) -> None:
        name = self._metric(run)
        # Callbacks may add it on the main process only; all processes count, so that any may continue without others.
        found = run.strategy.collectives.broadcast(metrics.get(name))
        if found is None:
            raise ValueError(
                f"EarlyStopping watches {name!r}, which the evaluation does not produce; "
                f"it produces {', '.join(map(repr, metrics)) or 'nothing'}"
            )
        if not run.state.step:  # `eval_on_start`: the best metric does not count it either
            return
        value = float(found)
        if self._improves(value, self._is_greater_better(run, name)):
            self.best, self.failures = value, 0
            return
        self.failures += 1
        if self.failures >= self.patience:
            run.requests.stop = True
            run.requests.reason = f"{name} has not improved on {self.best} in {self.failures} evaluations"
            if run.strategy.is_main:
                _logger.info("early stopping at step %d: %s", run.state.step, run.requests.reason)

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "failures": self.failures, "judged_by": self._judged_by}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        best, failures = state_dict["best"], state_dict["failures"]
        judged_by = state_dict.get("judged_by")  # earlier versions did not write it
        if type(failures) is not int or failures < 0 or not (best is None or type(best) in (int, float)):
            raise ValueError(f"best={best!r:.40}, failures={failures!r:.40} are no result of evaluations")
        if judged_by is not None and [*map(type, judged_by)] != [str, bool]:
            raise ValueError(f"judged_by={judged_by!r:.60} is not a metric's name and whether a greater one is better")
        self.best, self.failures, self._judged_by = best, failures, judged_by

    def _metric(self, run: Run) -> str:
        name = self.metric or run.args.metric_for_best_model or "eval_loss"
        return "eval_" + name.removeprefix("eval_")

    def _is_greater_better(self, run: Run, name: str) -> bool:
        if self.greater_is_better is not None:
            return self.greater_is_better
        if name == run.args.metric_for_best_model and run.args.greater_is_better is not None:
            return run.args.greater_is_better
        return not name.endswith("loss")

    def _improves(self, value: float, greater_is_better: bool) -> bool:
        if value != value:
            return False
        if self.best is None:
            return True
        change = value - self.best if greater_is_better else self.best - value
        return change > self.min_delta
