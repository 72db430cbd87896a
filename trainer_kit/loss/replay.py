"""`replay`: the passes of an optimizer step, run again outside of the training loop."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from trainer_kit.loss.batch import Counts
from trainer_kit.loss.loss import Loss, weighed
from trainer_kit.strategies.base import Strategy


class ReplayBatch(NamedTuple):
    """A micro-batch of the step.

    Attributes:
        batch: Batch on the host or the device.
        counts: Counts of the batch; zeros for a dummy batch.
        seed: Seed of all generators before the forward pass; None leaves the generators as they are.
    """

    batch: Any
    counts: Counts
    seed: int | None = None


def replay(loss: Loss, micro_batches: Sequence[ReplayBatch], strategy: Strategy) -> Iterator[torch.Tensor]:
    """Run the forward pass of each micro-batch as a training step does; yield its share of the step's loss.

    The caller runs the backward pass of a share before it takes the next one. Not collective: the step has the
    micro-batches of this process only.

    Args:
        loss: Loss of the model.
        micro_batches: This process's micro-batches of the step, in order.
        strategy: Strategy that is set up.
    """
    items = [loss.items(each.counts) for each in micro_batches]
    total, samples = sum(items), sum(each.counts.samples for each in micro_batches)
    for each, own in zip(micro_batches, items, strict=True):
        batch = strategy.to_device(each.batch)
        if not (isinstance(own, int) and own):
            batch = loss.with_valid_labels(batch, own, strategy.autocast)
        if each.seed is not None:
            strategy.seed(each.seed)
        with strategy.autocast():
            value, count = loss(batch)
        if count is None:
            yield weighed(value, own, total)
        else:
            yield value / samples if each.counts.samples else value * 0
