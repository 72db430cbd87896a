"""`LossProbe`: forward passes that find out how a model's loss treats labels and padding."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from typing import Any

import torch

from trainer_kit.loss.batch import IGNORED, has_columns, is_whole, labels_of, samples_of, shape_of, with_labels
from trainer_kit.loss.loss import Loss, columns_of
from trainer_kit.strategies.base import Strategy
from trainer_kit.utils.module_modes import state_aside
from trainer_kit.utils.pytree import keys, map_tensors, tensors
from trainer_kit.utils.units import join_names, pluralize
from trainer_kit.utils.user_warnings import warn
from trainer_kit.utils.wrappers import model_class

_TRIES = 10
"""Probes without an answer after which the answer is taken to be no."""

_CLOSE = 0.05
"""Relative tolerance of equal losses, wide enough for bfloat16; another divisor would at least halve the loss."""


class LossProbe:
    """Probe how a model's loss treats labels and padding, with a run's first batches.

    A probe is a forward pass without gradient, in evaluation mode unless noted. Batches are changed on the host, so
    that all probes are one computation for the device.

    Args:
        loss: The run's loss.
        strategy: The run's strategy, whose device is used.

    Attributes:
        ignores_filler: Whether samples without labels leave the loss of a batch unchanged, in training mode (key
            True) and in evaluation mode (key False); None until `detect_padding_invariance` finds an answer.
    """

    def __init__(self, loss: Loss, strategy: Strategy) -> None:
        self.loss = loss
        self.ignores_filler: dict[bool, bool | None] = dict.fromkeys(
            (False, True), None if loss.compute_loss is None and not loss.counts_samples else False
        )
        self._strategy = strategy
        self._tries = {"shift": 0, "filler": 0}

    def detect_label_shift(self, batch: Any) -> bool | None:
        """Check that the model takes the batch's columns, and detect whether it shifts its labels.

        A model that predicts the next token leaves the first label of each row out of its mean. Class names do not
        show this reliably (`GPT2LMHeadModel` shifts, T5 does not).

        Args:
            batch: One of the first batches, on the device.

        Returns:
            Whether the model shifts its labels; None if this batch does not show it.

        Raises:
            ValueError: If the model cannot be called with the batch; the message names the columns it does not take.
        """
        loss = self.loss
        if loss.compute_loss is None:
            _check_columns(loss.module, batch)
        labels = labels_of(batch)
        if loss.counts_samples or labels is None or not is_whole(labels) or labels.ndim < 2:
            loss.shifts = False
            return loss.shifts
        labels = labels.cpu()
        valid = labels[labels != IGNORED]
        if valid.numel() == 0:
            return None
        if valid.numel() < labels.numel():
            # The model knows -100 here. With valid labels in first place only, a shifting model's mean is empty.
            only_first = torch.full_like(labels, IGNORED)
            only_first[..., 0] = valid[0]
            loss.shifts = _is_nothing(self._look(with_labels(batch, only_first)))
        else:
            loss.shifts = self._ignores_first(batch, labels)
        if loss.returns_sum_and_count or self._gives_up("shift", loss.shifts):
            loss.shifts = False
        return loss.shifts

    def _ignores_first(self, batch: Any, labels: torch.Tensor) -> bool | None:
        """Return whether only the last labels, not the first, change the loss; None if neither do.

        It is for batches without -100, which the model may not know. An index out of range ends the process on CUDA, so
        only values that the labels hold (or 0 and 1) are used.
        """
        low, high = labels.min(), labels.max()
        if low == high:
            high = (low == 0).to(low.dtype)

        def changed(place: int) -> float:
            other = labels.clone()
            other[..., place] = torch.where(labels[..., place] == low, high, low)
            return self._look(with_labels(batch, other))

        loss = self._look(batch)
        if _is_nothing(loss):
            return labels.shape[-1] == 1
        if changed(0) != loss:
            return False
        return True if changed(-1) != loss else None

    def detect_padding_invariance(self, batch: Any, training: bool = False) -> bool | None:
        """Detect whether samples whose labels are all -100 leave the loss of a batch unchanged.

        The probe gives labels to one sample only. The loss must not depend on the other samples. It must also be the
        mean over the valid labels, and so equal the loss of a batch that repeats this sample.

        Args:
            batch: A batch on the host with at least two samples and integer labels.
            training: Whether to probe in training mode too, in which a model may add terms to its loss.

        Returns:
            Whether the loss is unchanged; None if this batch does not show it.
        """
        same, alone, others = _with_one_sample(batch)
        try:
            first = self._look(alone)
            if _is_nothing(first) or not _differ(alone, others):
                found = None
            else:
                found = self._look(others) == first and math.isclose(self._look(same), first, rel_tol=_CLOSE)
                if found and training:
                    found = self._look_in_training(alone) == self._look_in_training(others)
        except Exception:  # the model does not know -100, or fails on any batch, as the training will show
            found = False
        self.ignores_filler[training] = False if self._gives_up("filler", found) else found
        return self.ignores_filler[training]

    def _look(self, batch: Any) -> float:
        with torch.no_grad():
            return float(self.loss.eval_loss(self._strategy.to_device(batch), self._strategy.autocast))

    def _look_in_training(self, batch: Any) -> float:
        """Return the loss of a batch in the current mode, with a fixed seed for dropout."""
        self._strategy.seed(0)
        with state_aside(self.loss.module), torch.no_grad(), self._strategy.autocast():
            return float(self.loss(self._strategy.to_device(batch))[0])

    def _gives_up(self, question: str, answer: bool | None) -> bool:
        self._tries[question] += 1
        return answer is None and self._tries[question] >= _TRIES


def _is_nothing(loss: float) -> bool:
    return math.isnan(loss) or loss == 0.0


def _with_one_sample(batch: Any) -> tuple[Any, Any, Any]:
    """Return three batches whose first sample is that of `batch`, with all its labels valid.

    The other samples are: copies of the first; copies of the first without labels; other data without labels.
    """
    labels, rows = labels_of(batch), samples_of(batch)
    assert labels is not None
    assert rows > 1

    def repeated(tensor: torch.Tensor) -> torch.Tensor:
        return tensor[0].expand_as(tensor).contiguous() if _by_rows(tensor, rows) else tensor

    def changed(tensor: torch.Tensor) -> torch.Tensor:
        if not _by_rows(tensor, rows):
            return tensor
        other = tensor.flip(0, -1) if tensor.ndim > 1 else tensor.flip(0)
        other = other + 1 if tensor.is_floating_point() else other
        other[0] = tensor[0]
        return other

    same, others = map_tensors(repeated, batch), map_tensors(changed, batch)
    if isinstance(batch, Mapping):  # another mask may make a model choose another kernel
        others = {name: same[name] if str(name).endswith("mask") else others[name] for name in keys(batch)}
    counted = repeated(labels).clamp(min=0)
    alone = counted.clone()
    alone[1:] = IGNORED
    return with_labels(same, counted), with_labels(same, alone), with_labels(others, alone)


def _by_rows(tensor: torch.Tensor, rows: int) -> bool:
    return tensor.ndim > 0 and len(tensor) == rows


def _differ(one: Any, other: Any) -> bool:
    return any(not torch.equal(first, second) for first, second in zip(tensors(one), tensors(other), strict=True))


def _check_columns(module: torch.nn.Module, batch: Any) -> None:
    known = columns_of(module)
    if known is None and isinstance(batch, Mapping):
        _warn_of_swallowed_columns(module, batch)
    unknown = [str(key) for key in keys(batch) if key not in known] if known and isinstance(batch, Mapping) else []
    if known and unknown:
        raise ValueError(
            f"the batch has the {pluralize('column', len(unknown))} {join_names(unknown, most=None)}, which "
            f"{model_class(module).__name__}.forward does not take (it takes {', '.join(known)}); rename or remove "
            "them in the dataset or data_collator, or give compute_loss="
        )
    signature = inspect.signature(module.forward)
    try:
        if isinstance(batch, Mapping):
            signature.bind(**batch)
        else:
            signature.bind(*(batch if has_columns(batch) else (batch,)))
    except TypeError as error:
        raise ValueError(
            f"{model_class(module).__name__}.forward{signature} cannot be called with a batch, which is "
            f"{shape_of(batch)}: {error}; change the dataset or data_collator, or give compute_loss="
        ) from error


def _warn_of_swallowed_columns(module: torch.nn.Module, batch: Mapping[Any, Any]) -> None:
    """Warn about columns that a `forward` with **kwargs may ignore, unless it names no column, as a wrapper does."""
    parameters = inspect.signature(module.forward).parameters
    # Missing labels raise another error, since there is no loss without them.
    unknown = [str(key) for key in keys(batch) if key not in parameters and key not in ("labels", "label")]
    is_wrapper = all(each.kind in (each.VAR_POSITIONAL, each.VAR_KEYWORD) for each in parameters.values())
    if unknown and len(unknown) < len(keys(batch)) and not is_wrapper:
        warn(
            f"{model_class(module).__name__}.forward has no parameter for the {pluralize('column', len(unknown))} "
            f"{join_names(unknown, most=None)}, and takes other arguments as **kwargs; if that is a mistake, rename or "
            "remove them in the dataset or data_collator",
        )
