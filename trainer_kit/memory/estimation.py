"""`estimate`: the memory of a training step, without a real step."""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch

from trainer_kit.config.arguments import TrainingArguments
from trainer_kit.loss.batch import samples_of
from trainer_kit.loss.loss import ComputeLoss
from trainer_kit.memory import cuda
from trainer_kit.memory.anatomy import KINDS, Anatomy, Component
from trainer_kit.memory.costs import EightBitAdam
from trainer_kit.memory.errors import described
from trainer_kit.memory.fakes import Fakes
from trainer_kit.memory.kernels import hidden_on_cpu
from trainer_kit.memory.sharding import Sharding, make_sharding
from trainer_kit.memory.step import Inference, Step
from trainer_kit.memory.substitutes import Substitutes
from trainer_kit.memory.tracker import Tracker
from trainer_kit.optim import make_optimizer, parameter_groups
from trainer_kit.profiling.flops import FlopCounter
from trainer_kit.strategies.device_info import DeviceInfo
from trainer_kit.strategies.precision import Precision
from trainer_kit.strategies.recomputation import without_comparisons
from trainer_kit.strategies.single import SingleDevice
from trainer_kit.utils.pytree import map_tensors, tensors
from trainer_kit.utils.rng import generators_kept

_COUNTED = "counted on fake tensors"
_MICRO_BATCHES = 3
"""Micro-batches to simulate: the first, which allocates gradients, one that adds to them, and the last."""


def estimate(
    model: torch.nn.Module,
    args: TrainingArguments,
    batch: Any,
    *,
    compute_loss: ComputeLoss | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    device: str | torch.device = "cpu",
    world_size: int = 1,
    fsdp: int = 1,
    inference: bool = False,
) -> Anatomy:
    """Estimate the peak memory of an optimizer step on each device, without allocating it.

    The step runs on fake tensors, which have a shape and no values, as the Trainer takes it: autocast, accumulation,
    clipping, activation checkpointing, the optimizer's own code (except for 8-bit Adam, whose kernels need real values:
    see `COSTS`). Every storage is tracked from its allocation to its release. The state that the
    optimizer allocates in its first step counts from the start. A GPU is estimated without one, see
    `trainer_kit.memory.cuda`. With `torch_compile` the estimate is that of eager mode.

    Args:
        model: Model whose tensors may be real, fake or on the meta device; it stays unchanged.
        args: Arguments of the run.
        batch: Micro-batch that gives the shapes. Values of integer tensors count too, since models branch on masks and
            labels; on the meta device they are taken as ones.
        compute_loss: Loss function as for the Trainer; None for the model's own loss.
        optimizer: Optimizer of the model; None for the one that `args.optim` selects.
        device: "cpu", "cuda" or another; any device other than a GPU is estimated as a CPU.
        world_size: Number of processes of the run; with more than one, gradients are in DistributedDataParallel's
            buckets.
        fsdp: Number of processes over which the model is sharded; it divides `world_size`, or that is 1. A process
            holds its part of weights, gradients and optimizer state, and gathers the root unit and three more units.
        inference: Whether to estimate a forward pass in evaluation mode instead, without gradients and optimizer: that
            of an evaluation, a prediction, or one pass of a generation.

    Returns:
        The memory at the peak, by component.

    Raises:
        ValueError: If the model returns no loss, has nothing to train, branches on unknown values, does not run on
            fake tensors, or cannot be sharded.
    """
    sharding = make_sharding(model, args, fsdp, world_size)
    place = torch.device(device)
    repeated = max(1.0, args.gradient_accumulation_steps / _MICRO_BATCHES)
    args = copy.copy(args)
    args.gradient_accumulation_steps = min(args.gradient_accumulation_steps, _MICRO_BATCHES)
    is_cuda = place.type == "cuda"
    has_buckets = world_size > 1 and fsdp == 1
    tracker, counter = _simulate(model, args, batch, compute_loss, optimizer, is_cuda, has_buckets, inference, sharding)
    found = tracker.peak()
    components = [Component(kind, found[kind], f"{_COUNTED}: {KINDS[kind]}") for kind in KINDS if kind in found]
    if is_cuda:
        components.append(cuda.runtime())
    flops = {"model_flops": counter.flops.model, "recomputed_flops": counter.flops.recomputed}
    flops = {name: round(count * (1 if inference else repeated)) for name, count in flops.items()}
    return make_anatomy(components, model, batch, place, inference, shards=fsdp, **flops)


def _simulate(
    model: torch.nn.Module,
    args: TrainingArguments,
    batch: Any,
    compute_loss: ComputeLoss | None,
    optimizer: torch.optim.Optimizer | None,
    is_cuda: bool,
    has_buckets: bool,
    inference: bool,
    sharding: Sharding,
) -> tuple[Tracker, FlopCounter]:
    """Take a step, or a forward pass, on fake tensors and return what followed it."""
    fakes, counter = Fakes(), FlopCounter()
    tracker = Tracker(cuda.GRANULARITY, None, sharding) if is_cuda else Tracker(1, hidden_on_cpu, sharding)
    with generators_kept(torch.device("cpu")), _quiet(), _explained(), contextlib.ExitStack() as stack:
        stack.enter_context(without_comparisons())
        mode = args.mixed_precision.replace("fp8", "bf16")  # whose kernels need real values
        strategy = _Pretended(is_cuda, Precision(mode))
        strategy.setup()
        copied = fakes.copy(model).train()
        stack.enter_context(Substitutes(compute_loss, model, partial(fakes.copy, keeps_known=True)).in_place())
        if (options := args.checkpointing_options) is not None and not inference:
            strategy.enable_activation_checkpointing(copied, options)
        if is_cuda:
            stack.enter_context(cuda.AsOnCuda())
        stack.enter_context(fakes.computing())
        step: Step | Inference
        if inference:
            step = Inference(copied, fakes.batch(batch), compute_loss, strategy)
        else:
            made = fakes.copy(optimizer) if optimizer is not None else _optimizer(copied, args)
            if is_cuda:
                cuda.use_foreach(made)
            trained = [each for each in copied.parameters() if each.requires_grad] if has_buckets else []
            buckets: dict[torch.Tensor, torch.Tensor] = {each: torch.empty_like(each) for each in trained}
            step = Step(copied, made, args, fakes.batch(batch), compute_loss, strategy, buckets)
        ahead = map_tensors(torch.clone, step.batch) if is_cuda else None  # the prefetched next batch
        tracker.mark("batch", tensors(ahead))
        with counter:
            step.track(tracker)
        tracker.close()
    return tracker, counter


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    """Wrap a model's errors on fake tensors in a ValueError: real training may succeed."""
    try:
        yield
    except ValueError:
        raise
    except Exception as error:  # the model is the user's own
        raise ValueError(f"the memory of a step cannot be estimated: {described(error)}") from error


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence the log messages of models about arguments that are only tried, and of torch about handled errors."""
    loggers = [logging.getLogger(name) for name in ("transformers", "torch._subclasses.fake_tensor")]
    levels = [each.level for each in loggers]
    for each in loggers:
        each.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for each, level in zip(loggers, levels, strict=True):
            each.setLevel(level)


def make_anatomy(
    components: list[Component],
    model: torch.nn.Module,
    batch: Any,
    device: torch.device,
    inference: bool = False,
    **figures: int,
) -> Anatomy:
    """Return the anatomy of these components, with the facts about model and batch.

    Args:
        components: Components of the memory.
        model: Model, for the number of parameters.
        batch: Micro-batch, for its shapes.
        device: Device of the step.
        inference: Whether the components are those of a forward pass without gradients.
        figures: More fields of `Anatomy`.
    """
    parameters = [*model.parameters()]
    named = batch if isinstance(batch, Mapping) else dict(enumerate([*tensors(batch)]))
    return Anatomy(
        components=tuple(components),
        peak=sum(component.nbytes for component in components),
        device=device.type,
        inference=inference,
        parameters=sum(parameter.numel() for parameter in parameters),
        trainable=sum(parameter.numel() for parameter in parameters if parameter.requires_grad),
        batch_size=samples_of(batch),
        shape={str(name): list(each.shape) for name, each in named.items() if isinstance(each, torch.Tensor)},
        **figures,
    )


def _optimizer(model: torch.nn.Module, args: TrainingArguments) -> torch.optim.Optimizer:
    if args.optim == "adamw_8bit":
        return EightBitAdam(parameter_groups(model, args.weight_decay))
    return make_optimizer(model, args)


class _FarInfo(DeviceInfo):
    """A device whose values the host reads only after a synchronization."""

    @property
    def reads_without_sync(self) -> bool:
        return False


class _Pretended(SingleDevice):
    """The CPU in place of the estimated device.

    Args:
        is_far: Whether the host must synchronize to read values of the estimated device.
        precision: Precision of the run.
    """

    def __init__(self, is_far: bool, precision: Precision) -> None:
        super().__init__("cpu", precision)
        if is_far:
            self.device_info = _FarInfo(self.device)
