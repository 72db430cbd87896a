"""Substitutes for a run's own objects in a dry run, so that these stay unchanged."""

from __future__ import annotations

import collections
import contextlib
import copy
import logging
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from trainer_kit.config import environment
from trainer_kit.strategies.base import Strategy
from trainer_kit.utils.optimizer_state import optimizers_in

logger = logging.getLogger("trainer_kit")


class Stage(Strategy):
    """Substitute for a run's strategy: the same layout on the host, without the device and the other processes.

    Args:
        real: The run's strategy.
        processes: Number of processes to plan for; None for the real one.
        device: Device to compute on.
    """

    def __init__(self, real: Strategy, processes: int | None, device: torch.device) -> None:
        self.static_shapes, self.device, self.devices = real.static_shapes, device, _devices(real)
        super().__init__(copy.copy(real.precision))
        self.collectives.world_size = processes or real.world_size
        self.collectives.rank = real.rank if processes is None else 0
        self.collectives.reader_size = real.collectives.reader_size


def _devices(real: Strategy) -> int:
    """Return the number of devices per process; XLA devices are counted without setting them up."""
    kind = environment.xla_device_type() if real.device.type == "xla" and real.devices == 1 else None
    return max(1, environment.xla_devices(kind)) if kind is not None else real.devices


def stand_in(optimizer: torch.optim.Optimizer, groups: Sequence[Sequence[torch.Tensor]]) -> torch.optim.Optimizer:
    """Create an optimizer of the same type and options over other parameters, without state.

    Args:
        optimizer: Optimizer; it stays unchanged.
        groups: Parameters of each parameter group.

    Raises:
        ValueError: If `optimizer` consists of several optimizers, which both objects would share.
    """
    if len(optimizers_in(optimizer)) > 1:
        raise ValueError("it consists of several optimizers")
    other = object.__new__(type(optimizer))
    other.__dict__.update(vars(optimizer))
    other.__dict__.pop("step", None)  # a scheduler's wrapper, bound to the original optimizer
    other.param_groups = [
        copy.deepcopy({name: value for name, value in group.items() if name not in ("params", "param_names")})
        | {"params": [*parameters]}
        for group, parameters in zip(optimizer.param_groups, groups, strict=True)
    ]
    other.state = collections.defaultdict(dict)
    for name in {"_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"} & vars(optimizer).keys():
        setattr(other, name, type(getattr(optimizer, name))())
    return other


def schedule_only(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Create an optimizer of the same type and options without effect, for a scheduler to set its rates."""
    if len(optimizers_in(optimizer)) == 1:
        return stand_in(optimizer, [[torch.zeros(())] for _ in optimizer.param_groups])
    groups = [{**group, "params": [torch.zeros(())]} for group in optimizer.param_groups]
    for group in groups:
        group.pop("param_names", None)
    return torch.optim.Optimizer(groups, dict(getattr(optimizer, "defaults", {})))


@contextlib.contextmanager
def heard() -> Iterator[list[str]]:
    """Collect the messages of `warnings` and of the log in this context instead of showing them, without repeats."""
    messages: list[str] = []

    def hear(sentence: str) -> None:
        if sentence not in messages:
            messages.append(sentence)

    listener = _LogListener(hear)
    handlers, propagates = logger.handlers, logger.propagate
    logger.handlers, logger.propagate = [listener], False
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield messages
    finally:
        logger.handlers, logger.propagate = handlers, propagates
        for each in caught:
            if issubclass(each.category, UserWarning):
                hear(str(each.message))


class _LogListener(logging.Handler):
    def __init__(self, hear: Any) -> None:
        super().__init__(logging.WARNING)
        self._hear = hear

    def emit(self, record: logging.LogRecord) -> None:
        self._hear(record.getMessage())
