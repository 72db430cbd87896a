"""Batches of one size: the last of an epoch is filled up where that leaves the loss as it is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from trainer_kit.data.map_loader import MicroBatch
from trainer_kit.loss.batch import IGNORED, is_whole, labels_of, rows_of, samples_of
from trainer_kit.loss.probe import LossProbe
from trainer_kit.strategies.base import Strategy
from trainer_kit.utils.pytree import map_tensors, tensors


class Padding:
    """Fills up batches on the host, for a strategy that wants static shapes; for others it leaves them as they are.

    Rows are added whose labels are -100. What a batch counts for stays what its own samples count for, so that losses
    and gradients stay what they are, if the model's own loss is the mean over the labels that count, and no sample's
    loss depends on others (batch norm). That is looked at once; a batch for which it is not so goes as it is, which
    costs one more compilation.

    Args:
        inspection: Knows the model.
        strategy: Whether shapes are to be static; takes batches to the device.
        rows: Samples of a full batch.
        training: Whether the model is in training mode.
    """

    def __init__(self, inspection: LossProbe, strategy: Strategy, rows: int, training: bool = False) -> None:
        self.rows = rows
        self._inspection = inspection
        self._strategy = strategy
        self._training = training

    def filled(self, micro_batches: Iterator[MicroBatch]) -> Iterator[MicroBatch]:
        """Yield the micro-batches, filled up as far as it is not known yet that they cannot be."""
        for micro_batch in micro_batches:
            if self.wants(micro_batch.batch, micro_batch.samples):
                micro_batch.unfilled, micro_batch.batch = micro_batch.batch, pad_rows(micro_batch.batch, self.rows)
            yield micro_batch

    def kept(self, micro_batches: Iterator[MicroBatch]) -> Iterator[MicroBatch]:
        """Yield what `filled` gave, but as it was before where filling up would change the loss."""
        for micro_batch in micro_batches:
            if micro_batch.unfilled is not None and not self._is_exact(micro_batch.unfilled):
                micro_batch.unfilled, micro_batch.batch = None, micro_batch.unfilled
            yield micro_batch

    def wants(self, batch: Any, samples: int, with_loss: bool = True) -> bool:
        """Whether to fill up a batch of fewer samples than others."""
        if not self._strategy.static_shapes or samples >= self.rows or rows_of(batch) != samples:
            return False  # the rows are others than the samples where a collator packs them, or those of graphs
        if not with_loss:  # nothing tells then whether a tensor of another size goes with the samples
            return all(tensor.ndim and len(tensor) == samples for tensor in tensors(batch))
        labels = labels_of(batch)
        counted = labels is not None and is_whole(labels) and len(labels) == samples
        return counted and self._inspection.ignores_filler[self._training] is not False and not self._normalizes()

    def settled(self, batch: Any, unfilled: Any) -> Any:
        """The batch to go on with: as it was filled up, or as it was before.

        Args:
            batch: Filled up, on the device.
            unfilled: As it was before, on the host; None if it was full.
        """
        return batch if unfilled is None or self._is_exact(unfilled) else self._strategy.to_device(unfilled)

    def _is_exact(self, unfilled: Any) -> bool:
        """Return whether a batch has the same loss when it is filled up; the model is probed once."""
        if self._normalizes():
            return False
        if self._inspection.ignores_filler[self._training] is None:
            self._inspection.detect_padding_invariance(pad_rows(unfilled, self.rows), self._training)
        return bool(self._inspection.ignores_filler[self._training])

    def _normalizes(self) -> bool:
        """Whether a layer takes its statistics from the batch (`wants` may see the model during an evaluation)."""
        modules = self._inspection.loss.module.modules()
        return self._training and any(isinstance(module, _BatchNorm) and module.training for module in modules)


def pad_rows(batch: Any, rows: int) -> Any:
    """A batch filled up to `rows` samples with copies of its last one, whose labels are -100 if they are whole numbers.

    Tensors whose first dimension is another than that of the samples stay as they are.
    """
    samples = samples_of(batch)

    def longer(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.ndim == 0 or len(tensor) != samples:
            return tensor
        return torch.cat([tensor, tensor[-1:].expand(rows - samples, *tensor.shape[1:])])

    padded = map_tensors(longer, batch)
    labels = labels_of(padded)
    if labels is not None and is_whole(labels):
        labels[samples:] = IGNORED
    return padded


def trim_rows(outputs: Any, rows: int, samples: int) -> Any:
    """What a model gave for the first `samples` of a batch of `rows`: several rows a sample are cut likewise."""

    def shorter(tensor: torch.Tensor) -> torch.Tensor:
        by_rows = tensor.ndim > 0 and len(tensor) % rows == 0
        return tensor[: len(tensor) // rows * samples] if by_rows else tensor

    return map_tensors(shorter, outputs)
