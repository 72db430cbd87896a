"""`BatchMetrics`: a `compute_metrics` that takes the dataset a batch at a time."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from trainer_kit.loop.prediction import EvalPrediction
from trainer_kit.utils.pytree import map_tensors

logger = logging.getLogger("trainer_kit")


class BatchMetrics:
    """Metrics from `compute_metrics(batch, compute_result=...)`, as with transformers' `batch_eval_metrics`.

    The function takes an `EvalPrediction` of one batch, with tensors on the host. It returns the metrics of the dataset
    with its last batch, for which `compute_result` is true, and begins again with the next one. The passes of an
    evaluation are in its context, which warns if they end early.

    Args:
        compute_metrics: The function.
    """

    def __init__(self, compute_metrics: Callable[..., Mapping[str, Any]]) -> None:
        self._compute = compute_metrics
        self._has_batches = False

    def __enter__(self) -> None:
        self._has_batches = False

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is not None and self._has_batches:
            logger.warning(
                "the evaluation ended early, and compute_metrics(..., compute_result=) keeps the batches that it got; "
                "make a new one before the next evaluation, or that may count them too"
            )

    def add(self, batch: EvalPrediction) -> None:
        """Take a batch that is not the last."""
        self._has_batches = True
        self._compute(_as_tensors(batch), compute_result=False)

    def result(self, batches: Sequence[EvalPrediction]) -> Mapping[str, Any]:
        """Take the last batches, and return the metrics."""
        *others, last = batches or [EvalPrediction(None, None)]  # a loss may call no model
        for batch in others:
            self.add(batch)
        return self._compute(_as_tensors(last), compute_result=True)


def batch_metrics_of(compute_metrics: Callable[..., Mapping[str, Any]] | None) -> BatchMetrics | None:
    """Return the metrics of a function that has an argument `compute_result`; None for another function or None."""
    if compute_metrics is None:
        return None
    try:
        takes_batches = "compute_result" in inspect.signature(compute_metrics).parameters
    except (TypeError, ValueError):  # a builtin
        return None
    return BatchMetrics(compute_metrics) if takes_batches else None


def _as_tensors(batch: EvalPrediction) -> EvalPrediction:
    parts = (batch.predictions, batch.label_ids, batch.inputs, batch.losses)
    return EvalPrediction(*(map_tensors(torch.from_numpy, part, np.ndarray) for part in parts))
