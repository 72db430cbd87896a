"""Prepared models, optimizers and schedulers, and the state that all prepared objects of an Accelerator share."""

from __future__ import annotations

import logging
import types
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch.optim.lr_scheduler import LRScheduler

from trainer_kit.accelerator.unavailable import member
from trainer_kit.accelerator.utils.dataclasses import GradientAccumulationPlugin
from trainer_kit.strategies.base import Strategy
from trainer_kit.utils.pytree import map_tensors

__all__ = ["AcceleratedOptimizer", "AcceleratedScheduler", "PreparedOptimizer", "PreparedScheduler"]

logger = logging.getLogger("trainer_kit")


class BeingRead(Protocol):
    """State of a prepared loader's latest batch; see `PreparedLoader`."""

    gave_last: bool
    rows: int
    real: int

    @property
    def remainder(self) -> int:
        """See `PreparedLoader.remainder`."""

    @property
    def total_batch_size(self) -> int | None:
        """See `PreparedLoader.total_batch_size`."""


_BEING_READ: list[BeingRead] = []


class AccumulationState:
    """Position of the user's loop within an optimizer step.

    Copies of prepared objects share it. An unpickled object, for example in another process, belongs to no loop.

    Args:
        strategy: Strategy of the loop.
        settings: Settings of gradient accumulation.

    Attributes:
        strategy: Strategy of the loop.
        settings: Settings of gradient accumulation.
        sync_gradients: Whether this batch ends an optimizer step.
        batches: Batches in the unfinished optimizer step so far.
        steps: Optimizer steps taken.
        trained: Number of calls of `Accelerator.backward` and of `step` of prepared optimizers.
        loaders: Prepared loaders of this process that are being iterated, of any Accelerator, innermost last.
    """

    def __init__(self, strategy: Strategy, settings: GradientAccumulationPlugin | None = None) -> None:
        self.strategy = strategy
        self.settings = settings or GradientAccumulationPlugin()
        self._has_stepped = False  # since the last dispatch to the device
        self._has_cleared = False
        self.sync_gradients = True
        self.batches = 0
        self.steps = 0
        self.trained = 0
        self.loaders = _BEING_READ

    def __deepcopy__(self, memo: dict[int, Any]) -> AccumulationState:
        return self

    def __reduce__(self) -> tuple[Callable[[], AccumulationState], tuple[()]]:
        return _flow_of_no_loop, ()

    def next_batch(self) -> None:
        """Count a batch and determine whether it ends an optimizer step."""
        at_the_end = self.settings.sync_with_dataloader and bool(self.loaders) and self.loaders[-1].gave_last
        self.batches += 1
        self.sync_gradients = at_the_end or self.batches >= self.settings.num_steps
        if self.sync_gradients:
            self.batches = 0

    def dispatch(self) -> None:
        """Start the device on the recorded computation."""
        self._has_stepped = self._has_cleared = False
        self.strategy.device_info.mark_step()

    def has_stepped(self) -> None:
        """Count a step and dispatch it once its gradients are cleared, so that the device need not keep them.

        Dispatch without waiting if the loop clears gradients before the step, or iterates over no loader.
        """
        self.steps += 1
        self._has_stepped = True
        if self._has_cleared or not self.loaders:
            self.dispatch()

    def has_cleared(self) -> None:
        """Record that gradients were cleared; dispatch a pending step."""
        if self._has_stepped:
            self.dispatch()
        else:
            self._has_cleared = True


def _flow_of_no_loop() -> AccumulationState:
    """Return a state in which every batch ends an optimizer step."""
    strategy = Strategy()
    strategy.setup()
    return AccumulationState(strategy)


class StepRule(NamedTuple):
    """How often a prepared scheduler steps.

    Attributes:
        with_optimizer: Whether the scheduler follows its optimizer; if False, each call is a step.
        repeats: Scheduler steps per optimizer step.
        stops_at_end: Whether a schedule of known length stops at its end.
    """

    with_optimizer: bool = True
    repeats: int = 1
    stops_at_end: bool = False


def step_rule(with_optimizer: bool | Literal["once"], split_batches: bool, strategy: Strategy) -> StepRule:
    """Return the rule that `step_scheduler_with_optimizer` and `split_batches` set for schedulers."""
    if with_optimizer is not True or split_batches:
        return StepRule(with_optimizer is not False)
    repeats = strategy.world_size * strategy.devices
    if strategy.devices > 1:
        logger.warning(
            "a schedule steps %d times with each optimizer step, once for each device, which is right for one made "
            "from len(loader) before prepare(); multiply the length of one made from num_processes by %d, or give "
            "step_scheduler_with_optimizer='once'",
            repeats,
            strategy.devices,
        )
    return StepRule(repeats=repeats, stops_at_end=True)


def _nothing() -> None:
    pass


class PreparedOptimizer(torch.optim.Optimizer):
    """The user's optimizer, which steps and clears gradients only at the end of an optimizer step.

    Args:
        optimizer: The user's optimizer.
        strategy: Strategy that takes the step.
        flow: Accumulation state, which determines where a step ends.

    Attributes:
        optimizer: The user's optimizer.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, strategy: Strategy, flow: AccumulationState) -> None:
        # Not super().__init__(): parameters and state are the user's optimizer's.
        self.optimizer = optimizer
        self._strategy = strategy
        self._flow = flow
        self._was_skipped = False
        self._overflows: list[torch.Tensor] = []  # of the last step, until they are read

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step was skipped because fp16 gradients overflowed.

        The first read after a step with fp16 waits for the device.
        """
        overflows, self._overflows = self._overflows, []
        self._was_skipped = self._was_skipped or any(overflow.item() for overflow in overflows)
        return self._was_skipped

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer":  # not set yet in a copy
            raise AttributeError(name)
        return member(self.optimizer, "optimizer", name)

    def __getstate__(self) -> dict[str, Any]:
        skipped = self.step_was_skipped
        return {"optimizer": self.optimizer, "_was_skipped": skipped, "_overflows": [], "_flow": self._flow}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._strategy = self._flow.strategy

    def train(self) -> None:
        """Call the optimizer's `train`, if it has one as schedule-free ones do."""
        getattr(self.optimizer, "train", _nothing)()

    def eval(self) -> None:
        """Call the optimizer's `eval`, if it has one."""
        getattr(self.optimizer, "eval", _nothing)()

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.optimizer.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        return self.optimizer.defaults

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.optimizer.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state_dict)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, unless an optimizer step is unfinished.

        Args:
            set_to_none: Whether to release the gradients instead of filling them with zeros.
        """
        if self._flow.sync_gradients:
            self.optimizer.zero_grad(set_to_none)
            self._flow.has_cleared()

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Take a step, unless the optimizer step needs more batches.

        Args:
            closure: Reevaluates the model and returns the loss; None for optimizers that need none.

        Returns:
            The closure's loss; None without a closure or while gradients accumulate.

        Raises:
            ValueError: If `closure` is given together with fp16.
        """
        self._flow.trained += 1
        if not self._flow.sync_gradients:
            return None
        precision = self._strategy.precision
        scaler = precision.scaler if precision is not None else None
        if closure is not None:
            if scaler is not None:
                raise ValueError("step(closure) cannot be left out where fp16 overflows; use bf16, or step()")
            loss = self.optimizer.step(closure)
            self._flow.has_stepped()
            return loss
        if scaler is not None:
            # The host may be about to read whether gradients have overflowed.
            self._strategy.unscale(self.optimizer)
            self._flow.dispatch()
        self._strategy.step(self.optimizer)
        self._was_skipped, self._overflows = False, [] if precision is None else precision.overflows(self.optimizer)
        self._flow.has_stepped()
        return None


class PreparedScheduler(LRScheduler):
    """The user's scheduler, which steps only when its optimizer does.

    It skips calls while gradients accumulate, and after a step that was skipped because fp16 gradients overflowed. With
    fp16 it therefore waits for the device in each step: the next learning rate depends on the answer.

    Args:
        scheduler: The user's scheduler.
        optimizers: Optimizers whose steps it follows.
        flow: Accumulation state, which determines where a step ends.
        rule: How often it steps; see `StepRule`.
    """

    def __init__(
        self, scheduler: Any, optimizers: Sequence[PreparedOptimizer], flow: AccumulationState, rule: StepRule
    ) -> None:
        # Not super().__init__(): learning rates and counters are those of the user's scheduler.
        self.scheduler = scheduler
        self.optimizers = optimizers
        self.rule = rule
        self._flow = flow

    def __getattr__(self, name: str) -> Any:
        if name == "scheduler":  # not set yet in a copy
            raise AttributeError(name)
        return member(self.scheduler, "scheduler", name)

    def get_last_lr(self) -> list[Any]:
        rates: list[Any] = self.scheduler.get_last_lr()
        return rates

    def get_lr(self) -> list[Any]:
        rates: list[Any] = self.scheduler.get_lr()
        return rates

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = self.scheduler.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.scheduler.load_state_dict(state_dict)

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Step as the user's scheduler does, with the same arguments."""
        if not self.rule.with_optimizer:
            self.scheduler.step(*args, **kwargs)
        elif self._flow.sync_gradients and not any(optimizer.step_was_skipped for optimizer in self.optimizers):
            for _ in range(self.rule.repeats):
                if not (self.rule.stops_at_end and self._has_ended()):
                    self.scheduler.step(*args, **kwargs)

    def _has_ended(self) -> bool:
        """Return whether a schedule of known length is over: OneCycleLR would raise an error at its next step."""
        length = getattr(self.scheduler, "total_steps", None)
        return length is not None and self.scheduler.last_epoch >= length


AcceleratedOptimizer = PreparedOptimizer
AcceleratedScheduler = PreparedScheduler


def compute_in_precision(model: torch.nn.Module, autocast: Callable[[], Any]) -> None:
    """Make the model's own forward pass compute in mixed precision, with outputs in float32.

    Set a method on the instance, so that the model's class, attributes and copies work as before.
    """
    if getattr(model.__dict__.get("forward"), "in_precision", False):
        return
    inner = model.forward
    function: Any = inner.__func__ if isinstance(inner, types.MethodType) else lambda _, *args, **kw: inner(*args, **kw)

    def forward(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        with autocast():
            output = function(self, *args, **kwargs)
        return map_tensors(_to_float32, output)

    for name in ("__doc__", "__name__", "__qualname__"):
        setattr(forward, name, getattr(function, name))
    forward.__wrapped__ = function  # type: ignore[attr-defined]  # keeps the signature inspectable
    forward.in_precision = True  # type: ignore[attr-defined]
    model.forward = types.MethodType(forward, model)


def restore_forward(model: torch.nn.Module) -> None:
    """Undo `compute_in_precision`."""
    if getattr(model.__dict__.get("forward"), "in_precision", False):
        del model.forward


def _to_float32(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor
