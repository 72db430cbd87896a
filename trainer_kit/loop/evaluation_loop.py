"""`EvaluationLoop`: the evaluations and predictions of a run, with their callbacks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from trainer_kit.callback import CallbackList
from trainer_kit.data.build import make_evaluation_batches
from trainer_kit.data.map_loader import LoaderConfig
from trainer_kit.data.source import is_named
from trainer_kit.errors import DoesNotFitError
from trainer_kit.loop.batch_size_finder import evaluation_batch_size, halve_evaluation_batch
from trainer_kit.loop.evaluation import Evaluator
from trainer_kit.loop.metrics import Metric
from trainer_kit.loop.prediction import PredictionOutput
from trainer_kit.loss.probe import LossProbe
from trainer_kit.run import Run
from trainer_kit.utils.schedule_free import averaged_weights


class EvaluationLoop:
    """Evaluate datasets, and call the hooks around each evaluation.

    Args:
        run: The run; its strategy and model are prepared.
        events: The run's callbacks.
        probe: The probe of the run's loss.
        loader_config: How samples are read.
        metrics: Streaming metrics by name.
        compute_metrics: See `Evaluator`.
        preprocess_logits: See `Evaluator`.
        generation: See `Evaluator`.
    """

    def __init__(
        self,
        run: Run,
        events: CallbackList,
        probe: LossProbe,
        loader_config: LoaderConfig,
        metrics: Mapping[str, Metric],
        compute_metrics: Callable[..., Mapping[str, Any]] | None,
        preprocess_logits: Callable[[Any, Any], Any] | None = None,
        generation: Mapping[str, Any] | None = None,
    ) -> None:
        self.run = run
        self.events = events
        self.probe = probe
        self.loader_config = loader_config
        self._evaluator = Evaluator(run, probe, metrics, compute_metrics, preprocess_logits, generation)

    def evaluate(self, dataset: Any, prefix: str) -> dict[str, Any]:
        """Return the metrics of a dataset, or of a dict of datasets with each dataset's name in the prefix.

        Raises:
            ValueError: If the dict is empty.
        """
        if not is_named(dataset):
            return self.predict(dataset, prefix, keep=False).metrics
        if not dataset:
            raise ValueError("eval_dataset={} holds no dataset; give at least one by its name")
        metrics: dict[str, Any] = {}
        for name, each in dataset.items():
            metrics |= self.predict(each, f"{prefix}_{name}", keep=False).metrics
        return metrics

    def predict(self, dataset: Any, prefix: str, keep: bool = True) -> PredictionOutput:
        """Return the metrics of one dataset and, with `keep`, its predictions and labels."""
        run = self.run
        with run.ledger.during("evaluation"), averaged_weights(run.optimizer):
            metrics = None
            try:
                self.events.call("on_evaluate_begin", run)
                output = self._predict(dataset, prefix, keep)
                metrics = output.metrics
            finally:
                self.events.call("on_evaluate_end", run, metrics)
            return output

    def _predict(self, dataset: Any, prefix: str, keep: bool) -> PredictionOutput:
        run = self.run
        while True:
            batches = make_evaluation_batches(run, dataset, self.loader_config, evaluation_batch_size(run))
            try:
                return self._evaluator(batches, prefix, keep)
            except DoesNotFitError as error:
                halve_evaluation_batch(run, error)


def chosen_dataset(given: Any, chosen: Any) -> Any:
    """Return the dataset to evaluate.

    Args:
        given: The dataset given to the Trainer, or a dict of several; None without one.
        chosen: A dataset, or the name of one of those; None: what was given.

    Raises:
        ValueError: If there is none.
    """
    if isinstance(chosen, str):
        if not is_named(given) or chosen not in given:
            known = f"its names are {', '.join(map(repr, given))}" if is_named(given) else "it is no dict of datasets"
            raise ValueError(f"eval_dataset={chosen!r} is no name in the Trainer's eval_dataset: {known}")
        return given[chosen]
    if chosen is None and given is None:
        raise ValueError("evaluate() needs eval_dataset")
    return given if chosen is None else chosen
