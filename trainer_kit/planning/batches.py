"""First batches of a training, read as training would read them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from trainer_kit.data.iterable_loader import StreamLoader
from trainer_kit.data.map_loader import MicroBatch, TrainLoader
from trainer_kit.data.peek import first_batches
from trainer_kit.errors import ReadOnceError
from trainer_kit.loss.batch import is_whole, labels_of
from trainer_kit.run import Run
from trainer_kit.utils.pytree import tensors

_LOOKED_AT = 4
"""Number of micro-batches to read."""


class First(NamedTuple):
    """First micro-batches of one process.

    Attributes:
        micro_batches: Micro-batches in order; empty if no training is left.
        error: Error that reading them raised; None if there was none.
    """

    micro_batches: list[MicroBatch]
    error: Exception | None = None

    @property
    def largest(self) -> MicroBatch | None:
        """Batch with the most elements; None if there are no batches."""
        return max(
            self.micro_batches, key=lambda each: sum(tensor.numel() for tensor in tensors(each.batch)), default=None
        )


def look_at_first(run: Run, loader: TrainLoader | StreamLoader) -> First:
    """Read the first micro-batches, if training can read them again."""
    try:
        return First(first_batches(run, loader, min(_LOOKED_AT, run.total_steps - run.state.step)))
    except Exception as error:  # the dataset or the collator is the user's own
        return First([], error)


def batch_warnings(first: First, model: nn.Module) -> Iterator[str]:
    """Yield warnings about the first batches, alone and in combination with the model."""
    batches = first.micro_batches
    if isinstance(first.error, ReadOnceError):
        yield "train_dataset can be read only once: it was not read, so memory and FLOPs are unknown"
    if not batches:
        return
    labels = [labels_of(each.batch) for each in batches]
    if all(each is not None and is_whole(each) for each in labels) and not any(each.counts.labels for each in batches):
        yield (
            f"all labels of the first {len(batches)} batches are -100, which counts for nothing: these batches train "
            "nothing (see the dataset or data_collator)"
        )
    tokens, places = sum(each.counts.tokens for each in batches), sum(_places(each.batch) for each in batches)
    if tokens and tokens < 0.6 * places:
        yield (
            f"{1 - tokens / places:.0%} of the first batches is padding: group_by_length=True puts samples of like "
            "length together"
        )
    config = getattr(model, "config", None)
    longest = max((each.shape[1] for each in _ids(first)), default=0)
    positions = getattr(config, "max_position_embeddings", None)
    if isinstance(positions, int) and longest > positions > 0:
        yield f"a sequence of {longest:,} tokens is longer than the {positions:,} positions that the model knows"
    embedding = _embedding(model)
    largest = max((int(each.max()) for each in _ids(first) if each.numel()), default=0)
    if embedding is not None and largest >= embedding.num_embeddings:
        yield (
            f"the first batches hold the token {largest:,}, but the model knows {embedding.num_embeddings:,}: "
            "tokenizer and model do not fit"
        )


def _ids(first: First) -> list[torch.Tensor]:
    found = [each.batch.get("input_ids") for each in first.micro_batches if isinstance(each.batch, dict)]
    return [each for each in found if isinstance(each, torch.Tensor) and each.ndim == 2 and is_whole(each)]


def _places(batch: Any) -> int:
    ids = batch.get("input_ids") if hasattr(batch, "get") else None
    return ids.numel() if isinstance(ids, torch.Tensor) else 0


def _embedding(model: nn.Module) -> nn.Embedding | None:
    """Return the token embedding if the model exposes it as transformers' models do; else None."""
    look: Any = getattr(model, "get_input_embeddings", None)
    if look is None:
        return None
    try:
        found = look()
    except NotImplementedError:
        return None
    return found if isinstance(found, nn.Embedding) else None
