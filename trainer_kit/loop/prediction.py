"""`EvalPrediction` and `PredictionOutput`: what an evaluation passes to `compute_metrics` and `predict` returns."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple


@dataclasses.dataclass(frozen=True, eq=False)
class EvalPrediction:
    """The argument of `compute_metrics`, as in transformers; unpacks into predictions, labels and what else it holds.

    With `eval_do_concat_batches=False`, each attribute is a list with an entry for each batch.

    Attributes:
        predictions: The model's logits for all samples, an array or a tuple of arrays; of a transformers model with
            more outputs, a tuple of all but the loss and its configuration's `keys_to_ignore_at_inference`. With
            `predict_with_generate`, the generated token ids.
        label_ids: The labels of all samples, an array, a tuple if there are several columns, or a list if the labels of
            a batch are a list with an entry for each sample; None without labels.
        inputs: The model's main input of all samples; None without "inputs" in `include_for_metrics`.
        losses: The mean loss of its batch for each sample; None without "loss" in `include_for_metrics`.
    """

    predictions: Any
    label_ids: Any
    inputs: Any = None
    losses: Any = None

    def __iter__(self) -> Iterator[Any]:
        others = [each for each in (self.inputs, self.losses) if each is not None]
        return iter([self.predictions, self.label_ids, *others])

    def __getitem__(self, place: int) -> Any:
        return [*self][place]


class PredictionOutput(NamedTuple):
    """The result of `Trainer.predict`.

    Attributes:
        predictions: As in `EvalPrediction`, in the dataset's order.
        label_ids: As in `EvalPrediction`.
        metrics: Loss (if there are labels), metrics and speed, each name with the prefix.
    """

    predictions: Any
    label_ids: Any
    metrics: dict[str, Any]
