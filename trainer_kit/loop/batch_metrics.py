"""`BatchMetrics`: a `compute_metrics` that takes the dataset a batch at a time."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch

from trainer_kit.loop.prediction import EvalPrediction
from trainer_kit.utils.pytree import map_tensors

logger = logging.getLogger("trainer_kit")

_OF_TENSORS = "biufc"
"""Kinds of numpy's dtypes that torch has."""


class BatchMetrics:
    """Metrics from `compute_metrics(batch, compute_result=...)`, with `batch_eval_metrics`.

    The function takes an `EvalPrediction` of one batch, with tensors on the host. It returns the metrics of the dataset
    with its last batch, for which `compute_result` is true, and begins again with the next one. An evaluation is in
    this context, which warns if it ends with batches that the function may still have.

    Args:
        compute_metrics: The function.

    Raises:
        ValueError: If it has no argument `compute_result`.
    """

    def __init__(self, compute_metrics: Callable[..., Mapping[str, Any]]) -> None:
        if "compute_result" not in inspect.signature(compute_metrics).parameters:
            raise ValueError(
                "batch_eval_metrics=True needs a compute_metrics with an argument compute_result, which is true with "
                "the last batch; add it, or leave batch_eval_metrics out"
            )
        self._compute = compute_metrics
        self._has_batches = False

    def __enter__(self) -> None:
        self._has_batches = False

    def __exit__(self, *error: object) -> None:
        if self._has_batches:
            logger.warning(
                "the evaluation ended early, and compute_metrics(..., compute_result=) keeps the batches that it got; "
                "make a new one before the next evaluation, or that may count them too"
            )

    def add(self, batch: EvalPrediction) -> None:
        """Take a batch that is not the last."""
        self._has_batches = True
        self._compute(_of_tensors(batch), compute_result=False)

    def result(self, batches: Iterable[EvalPrediction]) -> Mapping[str, Any]:
        """Take the last batches, and return the metrics."""
        last = EvalPrediction(None, None)  # without batches, as where a loss calls no model
        for number, batch in enumerate(batches):
            if number:
                self.add(last)
            last = batch
        self._has_batches = True
        result = self._compute(_of_tensors(last), compute_result=True)
        self._has_batches = False
        return result


def _of_tensors(batch: EvalPrediction) -> EvalPrediction:
    parts = (batch.predictions, batch.label_ids, batch.inputs, batch.losses)
    return EvalPrediction(*(map_tensors(_to_tensor, part, np.ndarray) for part in parts))


def _to_tensor(array: np.ndarray) -> Any:
    return torch.from_numpy(array) if array.dtype.kind in _OF_TENSORS else array
