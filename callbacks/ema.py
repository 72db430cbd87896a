"""`EMA`: an exponential moving average of the weights, which evaluations use."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.swa_utils import get_ema_multi_avg_fn

from trainer_kit.callback import Callback
from trainer_kit.utils.foreach import copy_all
from trainer_kit.utils.own_loading import prefixes_of_own_loading
from trainer_kit.utils.pytree import repeated_dimensions

if TYPE_CHECKING:
    from trainer_kit.run import Run

_HALF = (torch.float16, torch.bfloat16)


class EMA(Callback):
    """Keep an exponential moving average of the weights, which evaluations and predictions use.

    Each update computes `average = decay * average + (1 - decay) * weight` for all floating-point parameters and
    buffers, including a batch norm's running mean and variance. Integer buffers are not averaged. Averages are on the
    model's device and in its dtype; for half precision they are in float32, since small updates would be rounded away.
    The average of a buffer that changes its shape begins again.
    A checkpoint's weights are the trained ones, and so are those of the best model loaded at the end. The averages are
    in the callback's state in the checkpoint; `copy_to` copies them into a model.

    Args:
        decay: Share of the old average that each update keeps, from 0 to below 1. The average spans about
            1 / (1 - decay) updates.
        every: Optimizer steps between two updates.
        start_step: Up to this step the averages equal the weights.

    Raises:
        ValueError: If an argument is out of range; in training, if a checkpoint's averages do not fit the model.
    """

    priority = -100

    def __init__(self, decay: float = 0.999, every: int = 1, start_step: int = 0) -> None:
        if not 0 <= decay < 1:
            raise ValueError(f"EMA(decay={decay!r}) must be a number of at least 0 and below 1")
        if every < 1:
            raise ValueError(f"EMA(every={every!r}) must be a whole number of at least 1")
        if start_step < 0:
            raise ValueError(f"EMA(start_step={start_step!r}) must be a whole number of at least 0")
        self.every = every
        self.start_step = start_step
        self._update = get_ema_multi_avg_fn(decay)
        self._averages: dict[str, torch.Tensor] = {}
        self._run: Run | None = None  # once it has begun
        self._weights: list[torch.Tensor] = []  # this process's parts of the model's tensors
        self._parts: list[torch.Tensor] = []  # and of the averages, in the same order
        self._own_loading: list[tuple[int, str]] = []  # places and names of the buffers that may be resized
        self._trained: list[torch.Tensor] = []  # copies of the weights while the model has the averages

    def on_train_begin(self, run: Run) -> None:
        live = _floating(run.model)
        if not self._averages:
            self._averages = {name: _copy(tensor) for name, tensor in live.items()}
        self._check(live)
        self._run, strategy = run, run.strategy
        averages = {name: strategy.sharding.place_like(self._averages[name], tensor) for name, tensor in live.items()}
        self._averages = {name: _like(_wide(tensor), averages[name]) for name, tensor in live.items()}
        self._weights = strategy.sharding.own_parts(live.values())
        self._parts = strategy.sharding.own_parts(self._averages.values())
        buffers = dict(run.model.named_buffers())
        own_loading = prefixes_of_own_loading(run.model)
        names = enumerate(live)
        self._own_loading = [each for each in names if each[1] in buffers and each[1].startswith(own_loading)]

    def on_rollback(self, run: Run, directory: Path) -> None:
        self.on_train_begin(run)  # the averages of the checkpoint, where the weights are

    def on_regroup(self, run: Run) -> None:
        self.on_train_begin(run)

    def on_step_end(self, run: Run) -> None:
        step = run.state.step
        if self._own_loading:
            self._follow_resized(run.model)
        if step % self.every:
            return
        with torch.no_grad():
            if step <= self.start_step:
                copy_all(self._parts, self._weights)
            else:
                self._update(self._parts, _all_wide(self._weights), 0)

    def on_evaluate_begin(self, run: Run) -> None:
        if self._averages and not self._trained:
            self._follow_resized(run.model)
            self._trained = [tensor.detach().clone() for tensor in self._weights]
            self._fill(self._parts)

    def on_evaluate_end(self, run: Run, metrics: dict[str, Any] | None) -> None:
        self._swap_out()

    def on_exception(self, run: Run, error: BaseException) -> None:
        self._swap_out()

    def copy_to(self, model: torch.nn.Module) -> None:
        """Copy the averages into a model. Where the trained model is sharded, all processes call it together.

        Args:
            model: A model with the same parameters and buffers as the trained one, on any device.

        Raises:
            ValueError: If its parameters or buffers have other names or shapes, or there are no averages yet.
        """
        live = _floating(model)
        self._check(live)
        strategy = None if self._run is None else self._run.strategy
        averages = self._averages if strategy is None else strategy.sharding.whole_tensors(self._averages)
        with torch.no_grad():
            for name, tensor in live.items():
                average = averages[name]
                tensor.copy_(average if strategy is None else strategy.sharding.place_like(average, tensor))

    def state_dict(self) -> dict[str, Any]:
        return {"averages": dict(self._averages)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._averages = {name: tensor.clone() for name, tensor in state_dict["averages"].items()}

    def _follow_resized(self, model: torch.nn.Module) -> None:
        """Take the present buffers of modules that may resize them; begin the average of a resized one again."""
        for place, name in self._own_loading:
            buffer = self._weights[place] = _stored(model.get_buffer(name))
            if buffer.shape != self._parts[place].shape:
                self._averages[name] = self._parts[place] = _copy(buffer)

    def _swap_out(self) -> None:
        if self._trained:
            for place, _ in self._own_loading:
                if self._weights[place].shape != self._trained[place].shape:  # resized by the evaluation
                    self._trained[place] = self._weights[place]
            self._fill(self._trained)
            self._trained = []

    def _fill(self, values: list[torch.Tensor]) -> None:
        with torch.no_grad():
            copy_all(self._weights, values)

    def _check(self, live: dict[str, torch.Tensor]) -> None:
        shapes = {name: tuple(tensor.shape) for name, tensor in live.items()}
        averaged = {name: tuple(tensor.shape) for name, tensor in self._averages.items()}
        if shapes != averaged:
            name = next(name for name in (*shapes, *averaged) if shapes.get(name) != averaged.get(name))
            raise ValueError(
                f"EMA's averages do not fit the model: {name!r} has shape {averaged.get(name, 'none')} in the averages "
                f"and {shapes.get(name, 'none')} in the model; use averages of the same model"
            )


def _floating(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return floating-point parameters and buffers by name: tied ones once, expanded ones without repetition."""
    named = itertools.chain(model.named_parameters(), model.named_buffers())
    return {name: _stored(tensor) for name, tensor in named if tensor.is_floating_point()}


def _stored(tensor: torch.Tensor) -> torch.Tensor:
    for dimension in repeated_dimensions(tensor):
        tensor = tensor.narrow(dimension, 0, 1)
    return tensor


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    """Convert a tensor to float32 if it is in half precision."""
    return tensor.detach().float() if tensor.dtype in _HALF else tensor.detach()


def _all_wide(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Convert those tensors to float32 that are in half precision, with one launch for each dtype."""
    wide = [torch.empty_like(each, dtype=torch.float32) if each.dtype in _HALF else each.detach() for each in tensors]
    pairs = [(new, old) for new, old in zip(wide, tensors, strict=True) if new.dtype != old.dtype]
    copy_all([new for new, _ in pairs], [old for _, old in pairs])
    return wide


def _like(weight: torch.Tensor, average: torch.Tensor) -> torch.Tensor:
    """Return the average with the weight's device, dtype and strides, which the fused update needs."""
    average = average.to(weight)
    return average if average.stride() == weight.stride() else torch.empty_like(weight).copy_(average)


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    wide = _wide(tensor)
    if wide.device.type == "xla":
        return wide.cpu().to(wide.device)  # via the host: both would share one buffer, which a step frees
    return wide.clone() if wide.dtype == tensor.dtype else wide
