"""`Strategy`: the only class that knows the hardware. The base class runs one process on one device."""

from __future__ import annotations

import contextlib
import math
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch

from trainer_kit.config.checkpointing_options import CheckpointingOptions
from trainer_kit.config.compile_options import CompileOptions
from trainer_kit.strategies.activation_checkpointing import (
    checkpoint_modules,
    enable_own_checkpointing,
    guard_own_checkpointing,
)
from trainer_kit.strategies.batch_shapes import ShapeLedger
from trainer_kit.strategies.collectives import Collectives
from trainer_kit.strategies.compilation import compile_model
from trainer_kit.strategies.device_info import DeviceInfo
from trainer_kit.strategies.grad_norms import GradientNorms, clip_to_norm
from trainer_kit.strategies.memory_format import in_channels_last, use_channels_last
from trainer_kit.strategies.optimizer_step import explain_failure, take_step
from trainer_kit.strategies.precision import Precision
from trainer_kit.strategies.regroup import Regroupable
from trainer_kit.strategies.session import Session
from trainer_kit.strategies.sharding import Sharding
from trainer_kit.utils import optimizer_state
from trainer_kit.utils.packed_layers import keep_unpacked
from trainer_kit.utils.pytree import move
from trainer_kit.utils.rng import seed_generators
from trainer_kit.utils.user_warnings import warn
from trainer_kit.utils.wrappers import model_class, without_wrappers

T = TypeVar("T")


class Strategy:
    """Use of devices and processes by a run: placement, precision, gradients, optimizer steps and states.

    A subclass overrides the methods that differ. It replaces `device_info`, `collectives`, `session` or `sharding` by
    a subclass in its `__init__` or `setup`.

    Args:
        precision: Mixed precision; None: the Trainer sets it from `args.mixed_precision`.

    Attributes:
        device: Device of the model and the batches.
        devices: Number of devices over which a batch of this process is divided; a batch has
            `devices * per_device_train_batch_size` samples.
        static_shapes: Whether each new batch shape costs a compilation, so that loaders avoid new shapes.
        shapes: The batch shapes that were fed to the model.
        reason: Why this strategy was chosen, for logs.
        channels_last: Whether convolutions' weights and batches are laid out in channels last; the Trainer sets it
            from `args.channels_last`.
        device_info: Memory, time, random numbers and host copies of the device.
        collectives: The layout of the processes and their collectives.
        session: Preemption, restarts and folders of the run's processes and machines.
        sharding: Division of the model's and the optimizer's tensors over the processes.
    """

    device: torch.device = torch.device("cpu")
    devices: int = 1
    static_shapes: bool = False
    reason: str = "chosen by the program"
    channels_last: bool = False

    def __init__(self, precision: Precision | None = None) -> None:
        self.precision = precision
        self.shapes = ShapeLedger(padded=self.static_shapes)
        self.device_info = DeviceInfo(self.device)
        self.collectives = Collectives()
        self.session = Session(self.collectives)
        self.sharding = Sharding()
        self._worst_norm: torch.Tensor | float | None = None  # largest norm so far, with nonfinite="stop"

    # Shortcuts for callbacks, see `collectives`

    @property
    def rank(self) -> int:
        """Rank of this process among all processes, from 0."""
        return self.collectives.rank

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return self.collectives.world_size

    @property
    def is_main(self) -> bool:
        """Whether this process writes logs and checkpoints."""
        return self.collectives.is_main

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensors of all processes, concatenated by rank along dimension 0; lengths may differ."""
        return self.collectives.gather(tensor)

    def barrier(self) -> None:
        """Wait until all processes have reached this call."""
        self.collectives.barrier()

    # Start and end of a run

    def setup(self) -> None:
        """Initialize the device, before the model is prepared; called once for each training or evaluation."""
        if self.precision is None:
            self.precision = Precision()
        self.precision.setup(self.device)
        self._worst_norm = None

    def teardown(self, error: BaseException | None = None) -> None:
        """Release what `setup` acquired.

        Args:
            error: The error that ended the run; None if it ended normally.
        """
        self.session.end_training(error)

    @property
    def regroupable(self) -> Regroupable | None:
        """This strategy if its processes can continue after a loss of others; None if new ones have to resume."""
        return None

    def seed(self, value: int) -> None:
        """Seed the generators of torch (host and device), numpy and random.

        The loop calls this before each step with a seed derived from (seed, step). The dropout of a step therefore
        does not depend on earlier evaluations, restarts or the number of workers.

        Args:
            value: The seed, below 2**63.
        """
        seed_generators(value)

    # Model, optimizer and data

    def make_model(self, model_init: Callable[[], torch.nn.Module]) -> torch.nn.Module:
        """Return a new model, whose values may be missing until `complete_model`; called before `setup`."""
        return model_init()

    def complete_model(
        self, model: torch.nn.Module, loaded: Collection[str], model_init: Callable[[], torch.nn.Module] | None
    ) -> None:
        """Give values to the tensors of a prepared model that have none yet. Collective.

        Args:
            model: The module that `prepare` returned.
            loaded: Names of the tensors that were loaded since.
            model_init: Makes the model, with the same values on each call; None if there is no such function.

        Raises:
            ValueError: If a tensor has no value; the message names it.
        """

    def prepare(self, model: torch.nn.Module) -> torch.nn.Module:
        """Move the model to the device in place, and return the module that the loop calls.

        Raises:
            ValueError: If a tensor of the model is on the meta device.
        """
        empty = next((name for name, value in model.state_dict().items() if getattr(value, "is_meta", False)), None)
        if empty is not None:
            raise ValueError(
                f"{empty} is on the meta device, without a value; make or load the model on a real device, or give "
                "model_init= and strategy='fsdp'"
            )
        keep_unpacked(model)
        model = model.to(self.device)
        if self.precision is not None:
            self.precision.convert(model)
        if self.channels_last and not use_channels_last(model) and self.is_main:
            warn(f"channels_last=True, but {model_class(model).__name__} has no weight of 4 or 5 dimensions: remove it")
        return model

    def enable_activation_checkpointing(
        self, model: torch.nn.Module, options: CheckpointingOptions | None = None
    ) -> None:
        """Let a model recompute activations in the backward pass: by its own method, or as the options say.

        Args:
            model: The user's model.
            options: Which modules recompute which activations. None, or the default ones: as the model's own
                `gradient_checkpointing_enable` does it, if it has that method.

        Raises:
            ValueError: If no module is found.
        """
        options = CheckpointingOptions() if options is None else options
        if options.are_default and enable_own_checkpointing(model):
            guard_own_checkpointing(model)
        else:
            checkpoint_modules(model, options)

    def compile(self, model: torch.nn.Module, options: CompileOptions) -> None:
        """Compile the model by torch.compile at its first call.

        Raises:
            ValueError: If the options do not fit the model or this strategy.
        """
        compile_model(self.unwrap(model), options)

    def unwrap(self, model: torch.nn.Module) -> torch.nn.Module:
        """Return the user's module inside the one that `prepare` returned."""
        return model

    def release_models(self) -> None:
        """Drop all references to prepared models."""

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Return the optimizer, with the prepared parameters if it was made before `prepare`."""
        return optimizer

    def prepared_parameters(self, parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Return the parameters, with the replacement of each one that `prepare` replaced."""
        return list(parameters)

    def prepare_loader(self, batches: Iterable[T]) -> Iterator[T]:
        """Return an iterator over `batches` that may prefetch their tensors to the device."""
        return iter(batches)

    def to_device(self, batch: Any) -> Any:
        """Return the batch with its tensors on the device, and record its shapes."""
        self.shapes.record(batch)
        batch = move(batch, self.device, non_blocking=self.device_info.pins_memory)
        return in_channels_last(batch) if self.channels_last else batch

    # A step

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Return the autocast context of a forward pass."""
        assert self.precision is not None, "setup() comes first"
        return self.precision.autocast(self.device)

    def uneven_passes(self) -> contextlib.AbstractContextManager[None]:
        """Return the context of forward passes without gradients whose number may differ between processes.

        All processes enter and leave it together. A strategy whose forward pass is a collective evens the number.
        """
        return contextlib.nullcontext()

    def own_passes(self, model: torch.nn.Module) -> contextlib.AbstractContextManager[None]:
        """Return the context in which this process alone calls the user's model, with tensors in place of its weights.

        See `torch.func.functional_call`.
        """
        return contextlib.nullcontext()

    def no_sync(self, model: torch.nn.Module) -> contextlib.AbstractContextManager[Any]:
        """Return the context of each micro-batch except a step's last, in which gradients are not exchanged."""
        return contextlib.nullcontext()

    def trigger_sync(self, model: torch.nn.Module) -> contextlib.AbstractContextManager[Any]:
        """Return the context of a backward pass that exchanges gradients after a forward pass in `no_sync`."""
        return contextlib.nullcontext()

    def join_uneven(self, models: Sequence[torch.nn.Module]) -> contextlib.AbstractContextManager[Any]:
        """Return the context of training steps whose number differs between processes; all enter and leave it."""
        return contextlib.nullcontext()

    def backward(self, loss: torch.Tensor, **options: Any) -> None:
        """Backpropagate this process's share of the step's loss; gradients are summed over all processes.

        Args:
            loss: Scalar with gradients.
            options: Arguments of `torch.Tensor.backward`.
        """
        assert self.precision is not None, "setup() comes first"
        self.precision.scaled(loss).backward(**options)

    def defer_gradient_sync(self, is_deferred: bool) -> None:
        """Choose whether `sync_gradients` completes the sum of the gradients instead of a step's last backward pass.

        Called before `prepare`. With `is_deferred`, a process may abort a backward pass, since no other waits for it:
        it calls `abandon_gradient_sync` if the pass was a step's last.

        Raises:
            ValueError: If this strategy cannot defer the exchange.
        """

    def sync_gradients(self, model: torch.nn.Module) -> None:
        """Sum the deferred gradients over all processes, after a step's last micro-batch."""

    def abandon_gradient_sync(self, model: torch.nn.Module) -> None:
        """Take part in the sum of a step's gradients without any, since the step's last pass failed here.

        The other processes may have begun to sum. They learn of the failure afterwards, before `sync_gradients`.
        """

    def discard_gradient_sync(self, model: torch.nn.Module) -> None:
        """Drop the deferred gradients of a step whose last pass failed on any process, in place of `sync_gradients`."""

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients by the fp16 loss scale, at most once a step, so that they can be read before `step`."""
        assert self.precision is not None, "setup() comes first"
        self.precision.unscale(optimizer)

    @property
    def scales_gradients(self) -> bool:
        """Whether fp16's gradient scaler is in use, which skips steps whose gradients overflow."""
        return self.precision is not None and self.precision.scaler is not None

    def step(
        self,
        optimizer: torch.optim.Optimizer,
        max_norm: float | None = None,
        max_value: float | None = None,
        nonfinite: str = "ignore",
    ) -> GradientNorms | None:
        """Clip the gradients and step the optimizer, without waiting for the device.

        Args:
            optimizer: Optimizer whose gradients are complete.
            max_norm: Largest total norm of the gradients; None or 0: no clipping.
            max_value: Largest absolute value of a gradient's element; None or 0: no clipping.
            nonfinite: "skip" leaves weights and optimizer unchanged in a step whose gradients are not finite. Fused
                optimizers decide that on the device; for others the host reads the norm. "stop" leaves them unchanged
                in all later steps too, if that needs no wait for the device. The run then ends with the values from
                before that step.

        Returns:
            The gradients' norms before clipping; None if neither `max_norm` nor `nonfinite` needs them.
        """
        assert self.precision is not None, "setup() comes first"
        self.unscale(optimizer)
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        grads = self.sharding.gradients(parameters)
        norms = total = None
        if grads and (max_norm or nonfinite != "ignore"):
            norms = self.sharding.gradient_norms(parameters, grads)
            total = norms.total.item() if self.device_info.reads_without_sync else norms.total
            if max_norm:
                clip_to_norm(grads, norms.total, max_norm, total)
        if max_value:
            torch._foreach_clamp_min_(grads, -max_value)
            torch._foreach_clamp_max_(grads, max_value)
        judged = None
        if norms is not None and nonfinite == "skip":
            judged = total
        elif norms is not None and nonfinite == "stop" and self._can_hold(optimizer):
            judged = self._worst_norm = total if self._worst_norm is None else _larger(self._worst_norm, total)
            norms = GradientNorms(norms.each, norms.total, parameters, held=True)
        try:
            self._take_step(optimizer, judged)
        except RuntimeError as error:
            explain_failure(optimizer, error, self.sharding.is_active)
            raise
        return norms

    def _take_step(self, optimizer: torch.optim.Optimizer, norm: torch.Tensor | float | None) -> None:
        """Step, unless fp16's gradients have overflowed or `norm` is not finite."""
        assert self.precision is not None
        if self.scales_gradients:
            self.precision.step(optimizer)
        elif norm is None:
            take_step(optimizer)
        elif isinstance(norm, torch.Tensor) and _is_fused(optimizer):
            # `torch.amp.GradScaler` passes found_inf to a fused optimizer in the same way.
            optimizer.found_inf = (~torch.isfinite(norm)).float()  # type: ignore[attr-defined]
            try:
                take_step(optimizer)
            finally:
                del optimizer.found_inf  # type: ignore[attr-defined]
        elif math.isfinite(norm):
            take_step(optimizer)

    def _can_hold(self, optimizer: torch.optim.Optimizer) -> bool:
        # fp16's gradient scaler skips steps itself while it searches for a scale.
        return (self.device_info.reads_without_sync or _is_fused(optimizer)) and not self.scales_gradients

    def zero_grad(self, optimizer: torch.optim.Optimizer) -> None:
        """Free the gradients, without the profiler scope that torch's `zero_grad` opens each time."""
        if type(optimizer).zero_grad is not torch.optim.Optimizer.zero_grad:
            optimizer.zero_grad()  # it may free more than gradients
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    # States, for checkpoints: all processes call these

    def model_state(self, model: torch.nn.Module) -> dict[str, Any]:
        """Return the model's `state_dict` by the user's own names, without the prefixes of wrappers.

        Not all values need be tensors, see `get_extra_state`. A tensor may still be sharded over devices:
        `device_info.to_host` and `copy_to_host` return the full tensor to write. See `sharding` for one that is
        sharded over processes.
        """
        return without_wrappers(self.unwrap(model)).state_dict()

    def load_model_state(self, model: torch.nn.Module, state: Mapping[str, Any]) -> None:
        """Load tensors and values by their names in `model_state`; called once for each file.

        Args:
            model: The module that `prepare` returned, or the user's own.
            state: Full tensors of a part of the model, the model's own ones if the file was read directly into them,
                and all values that are no tensors.
        """
        without_wrappers(self.unwrap(model)).load_state_dict(state, strict=False)

    def parameter_names(self, model: torch.nn.Module) -> dict[torch.Tensor, str]:
        """Return the user's own name of each parameter, without the prefixes of wrappers."""
        return {each: name for name, each in without_wrappers(self.unwrap(model)).named_parameters()}

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return the optimizer's state for a checkpoint.

        Raises:
            TypeError: If its `state_dict()` returns no dict.
            ValueError: If its `state_dict()` fails, or omits the state of an inner optimizer.
        """
        return optimizer_state.optimizer_state(optimizer)

    def load_optimizer_state(self, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
        """Load a state that `optimizer_state` returned, so that the next step is bit-identical.

        Raises:
            ValueError: If the optimizer rejects the state, or does not load all of it.
        """
        optimizer_state.load_optimizer_state(optimizer, state)


def clear_frames(error: BaseException | None) -> None:
    """Free the local variables in an error's tracebacks, such as activations."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def _larger(worst: Any, norm: Any) -> Any:
    """Return the running maximum, as a tensor or a number; it stays non-finite after the first bad step."""
    if isinstance(norm, torch.Tensor):
        return torch.maximum(worst, norm)
    return worst if worst > norm or not math.isfinite(worst) else norm


def _is_fused(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the optimizer's step reads `found_inf`; one that only calls fused optimizers does not."""
    takes_found_inf = getattr(optimizer, "_step_supports_amp_scaling", False)
    return takes_found_inf and all(group.get("fused") for group in optimizer.param_groups)
