"""`PlannedTraining`: the objects of a Trainer that a plan is made from."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch

from trainer_kit.callback import CallbackList
from trainer_kit.data.collate import Collator
from trainer_kit.loop.metrics import Metric
from trainer_kit.loss.loss import ComputeLoss
from trainer_kit.run import Run


@dataclasses.dataclass(frozen=True)
class PlannedTraining:
    """Objects of a Trainer that a plan is made from, as the user gave them.

    Attributes:
        run: Model, datasets and arguments.
        events: Callbacks.
        collate: Collator of the training batches.
        eval_collate: Collator of the evaluation batches.
        compute_loss: The user's loss function; None for the model's own loss.
        compute_metrics: The user's metrics function; None for none.
        preprocess_logits: The user's function of logits and labels; None for none.
        metrics: Streaming metrics by name.
        optimizer: The user's optimizer; None for the one that `args.optim` selects.
        lr_scheduler: The user's scheduler, or a function that creates one; None for the one that the arguments select.
    """

    run: Run
    events: CallbackList
    collate: Collator
    eval_collate: Collator
    compute_loss: ComputeLoss | None
    compute_metrics: Callable[..., Mapping[str, Any]] | None
    preprocess_logits: Callable[[Any, Any], Any] | None
    metrics: Mapping[str, Metric]
    optimizer: torch.optim.Optimizer | None
    lr_scheduler: Any
