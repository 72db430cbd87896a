"""Padding of incomplete batches to the size of full ones, if that leaves the loss unchanged."""

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
    """Pad batches with rows on the host if the strategy has static shapes; otherwise leave them unchanged.

    The added rows have labels of -100, and the counts of a batch stay those of its own samples. Losses and gradients
    stay the same if the model's loss is the mean over the valid labels and no sample's loss depends on others (as with
    batch norm). The model is probed for this once. If it does not hold, batches stay unpadded, which costs one more
    compilation.

    Args:
        inspection: The probe of the model's loss.
        strategy: The run's strategy, which has static shapes or not.
        rows: Samples of a full batch.
        training: Whether the batches are for training.
    """

    def __init__(self, inspection: LossProbe, strategy: Strategy, rows: int, training: bool = False) -> None:
        self.rows = rows
        self._inspection = inspection
        self._strategy = strategy
        self._training = training

    def filled(self, micro_batches: Iterator[MicroBatch]) -> Iterator[MicroBatch]:
        """Yield the micro-batches, padded unless it is known that padding changes the loss."""
        for micro_batch in micro_batches:
            if self.wants(micro_batch.batch, micro_batch.samples):
                micro_batch.unfilled, micro_batch.batch = micro_batch.batch, pad_rows(micro_batch.batch, self.rows)
            yield micro_batch

    def kept(self, micro_batches: Iterator[MicroBatch]) -> Iterator[MicroBatch]:
        """Yield the micro-batches from `filled`, without the padding if it changes the loss."""
        for micro_batch in micro_batches:
            if micro_batch.unfilled is not None and not self._is_exact(micro_batch.unfilled):
                micro_batch.unfilled, micro_batch.batch = None, micro_batch.unfilled
            yield micro_batch

    def wants(self, batch: Any, samples: int, with_loss: bool = True) -> bool:
        """Return whether to pad a batch that has fewer samples than a full one.

        Args:
            batch: The batch on the host.
            samples: Its samples.
            with_loss: Whether its loss is needed.
        """
        if not self._strategy.static_shapes or samples >= self.rows or rows_of(batch) != samples:
            return False  # with packed samples or graphs, rows are not samples
        if not with_loss:  # without labels, a tensor of another size may belong to the samples too
            return all(tensor.ndim and len(tensor) == samples for tensor in tensors(batch))
        labels = labels_of(batch)
        counted = labels is not None and is_whole(labels) and len(labels) == samples
        return counted and self._inspection.ignores_filler[self._training] is not False and not self._normalizes()

    def settled(self, batch: Any, unfilled: Any) -> Any:
        """Return the batch to use: the padded one, or the original if padding changes the loss.

        Args:
            batch: The padded batch on the device.
            unfilled: The batch before padding, on the host; None if it was not padded.
        """
        return batch if unfilled is None or self._is_exact(unfilled) else self._strategy.to_device(unfilled)

    def _is_exact(self, unfilled: Any) -> bool:
        """Return whether padding leaves the batch's loss unchanged; the model is probed once."""
        if self._normalizes():
            return False
        if self._inspection.ignores_filler[self._training] is None:
            self._inspection.detect_padding_invariance(pad_rows(unfilled, self.rows), self._training)
        return bool(self._inspection.ignores_filler[self._training])

    def _normalizes(self) -> bool:
        """Return whether a batch norm uses the batch's statistics."""
        modules = self._inspection.loss.module.modules()
        return self._training and any(isinstance(module, _BatchNorm) and module.training for module in modules)


def pad_rows(batch: Any, rows: int) -> Any:
    """Pad a batch to `rows` samples with copies of its last one; integer labels of the copies are -100.

    Tensors whose first dimension is not the number of samples stay unchanged.
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
    """Trim a model's outputs for a batch of `rows` samples to its first `samples`; a sample may have several rows."""

    def shorter(tensor: torch.Tensor) -> torch.Tensor:
        by_rows = tensor.ndim > 0 and len(tensor) % rows == 0
        return tensor[: len(tensor) // rows * samples] if by_rows else tensor

    return map_tensors(shorter, outputs)
