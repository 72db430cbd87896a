"""`Strategy`: the only piece that knows the hardware. This base runs one process; subclasses override what differs."""

from __future__ import annotations

import contextlib
import inspect
import math
import traceback
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

import torch

from trainer_kit.strategies.batch_shapes import ShapeLedger
from trainer_kit.strategies.collectives import Collectives
from trainer_kit.strategies.device_info import DeviceInfo
from trainer_kit.strategies.grad_norms import GradientNorms, gradient_norms, gradient_values
from trainer_kit.strategies.precision import Precision
from trainer_kit.strategies.session import Session
from trainer_kit.utils import optimizer_state
from trainer_kit.utils.pytree import move
from trainer_kit.utils.rng import seed_generators
from trainer_kit.utils.wrappers import without_wrappers

T = TypeVar("T")


class Strategy:
    """How a run uses its devices and processes: placement, precision, gradients, the optimizer's step and states.

    A subclass overrides the methods that differ, and replaces a part (`device_info`, `collectives`, `session`) by a
    subclass of it, in its `__init__` or `setup`.

    Args:
        precision: Mixed precision; the Trainer sets it from `args.mixed_precision` where none is given.

    Attributes:
        device: Where the model and the batches go.
        devices: Number of devices that each of this process's batches is divided over; a batch has so many times
            `per_device_train_batch_size` samples.
        static_shapes: Whether each new shape of a batch costs a compilation, so that loaders avoid them.
        shapes: The shapes of the batches that were fed to the model.
        reason: Why this strategy was chosen, for logs.
        device_info: Memory, time, random numbers and host copies of the device.
        collectives: The layout of the processes and what they exchange.
        session: Preemption, restarts and folders among processes and machines.
    """

    device: torch.device = torch.device("cpu")
    devices: int = 1
    static_shapes: bool = False
    reason: str = "chosen by the program"

    def __init__(self, precision: Precision | None = None) -> None:
        self.precision = precision
        self.shapes = ShapeLedger(padded=self.static_shapes)
        self.device_info = DeviceInfo(self.device)
        self.collectives = Collectives()
        self.session = Session(self.collectives)
        self._worst_norm: torch.Tensor | None = None  # of the steps so far, where a bad one is to be the last

    # For callbacks, in short: see `collectives`

    @property
    def rank(self) -> int:
        """Number of this process among all, from 0."""
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
        """Return the processes' tensors joined along the first dimension, by rank; lengths may differ."""
        return self.collectives.gather(tensor)

    def barrier(self) -> None:
        """Wait until all processes are here."""
        self.collectives.barrier()

    # A run's beginning and end

    def setup(self) -> None:
        """Take the device; called before the model is prepared, once for each training or evaluation."""
        if self.precision is None:
            self.precision = Precision()
        self.precision.setup(self.device)
        self._worst_norm = None

    def teardown(self, error: BaseException | None = None) -> None:
        """Release what `setup` took; `error` is what ended the run, None where it ended in good order."""
        self.session.end_training(error)

    def seed(self, value: int) -> None:
        """Seed the generators of torch (host and device), numpy and random; `value` is below 2**63.

        The loop calls it before every step with a number made from (seed, step), so that the dropout of a step
        does not depend on what happened before it: an evaluation, a restart, or another number of workers.
        """
        seed_generators(value)

    # Model, optimizer and data

    def prepare(self, model: torch.nn.Module) -> torch.nn.Module:
        """Move the model to the device, in place, and return what the loop calls.

        Raises:
            ValueError: If the model has no weights yet (they are on the meta device).
        """
        empty = next((name for name, value in model.state_dict().items() if getattr(value, "is_meta", False)), None)
        if empty is not None:
            raise ValueError(f"{empty} is on the meta device, without a value; make or load the model on a real device")
        return model.to(self.device)

    def enable_activation_checkpointing(self, model: torch.nn.Module) -> None:
        """Turn on the model's own activation checkpointing (transformers 5 renamed the method).

        Raises:
            ValueError: If it has none.
        """
        for name in ("activation_checkpointing", "gradient_checkpointing"):
            if enable := getattr(model, f"{name}_enable", None):
                keyword, takes = f"{name}_kwargs", inspect.signature(enable).parameters
                enable(**({keyword: {"use_reentrant": False}} if keyword in takes else {}))
                return
        raise ValueError(
            f"gradient_checkpointing=True, but {type(model).__name__} has no gradient_checkpointing_enable(); use "
            "torch.utils.checkpoint in its forward"
        )

    def compile(self, model: torch.nn.Module) -> None:
        """Let torch.compile compile the model at its first call."""
        model.compile()

    def unwrap(self, model: torch.nn.Module) -> torch.nn.Module:
        """Return the user's own module under what `prepare` returned."""
        return model

    def release_models(self) -> None:
        """Drop all references to models that were prepared."""

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Return the optimizer for the prepared model; one made before `prepare` gets the prepared parameters."""
        return optimizer

    def prepared_parameters(self, parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Return the parameters, those that `prepare` has replaced as their replacements."""
        return list(parameters)

    def prepare_loader(self, batches: Iterable[T]) -> Iterator[T]:
        """Return an iterator over `batches`, whose tensors may be moved to the device ahead of their use."""
        return iter(batches)

    def to_device(self, batch: Any) -> Any:
        """Return the batch with its tensors on the device, and record its shapes."""
        self.shapes.record(batch)
        return move(batch, self.device, non_blocking=self.device_info.pins_memory)

    # A step

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Return the context of a forward pass."""
        assert self.precision is not None, "setup() comes first"
        return self.precision.autocast(self.device)

    def no_sync(self, model: torch.nn.Module) -> contextlib.AbstractContextManager[Any]:
        """Return the context of every micro-batch but a step's last: gradients stay on this process."""
        return contextlib.nullcontext()

    def backward(self, loss: torch.Tensor, **options: Any) -> None:
        """Backpropagate this process's share of the step's loss; gradients add up to the sum over all processes.

        Args:
            loss: A number with gradients.
            options: Arguments of `torch.Tensor.backward`.
        """
        assert self.precision is not None, "setup() comes first"
        self.precision.scaled(loss).backward(**options)

    def defer_gradient_sync(self, is_deferred: bool) -> None:
        """Set whether `sync_gradients` sums the gradients, not a step's last backward pass; called before `prepare`.

        A process may then leave a backward pass early: no other waits for it there.

        Raises:
            ValueError: If that is not possible here.
        """

    def sync_gradients(self, model: torch.nn.Module) -> None:
        """Sum gradients over all processes that `backward` has not summed; called after a step's last micro-batch."""

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients by fp16's scale, where they are read before `step`; once a step."""
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
            optimizer: Its `.grad`s are complete.
            max_norm: Largest norm of all gradients together; None or 0 leaves them as they are.
            max_value: Largest absolute value of a gradient's element; None or 0 leaves them as they are.
            nonfinite: With "skip", a step whose gradients are not finite leaves weights and optimizer as they are.
                Fused optimizers decide that on the device; for others the host has to read the norm. With "stop" all
                later steps leave them too, where that costs no waiting: the run ends with the values from before the
                bad step.

        Returns:
            The gradients' norms before clipping; None where neither `max_norm` nor `nonfinite` asks for them.
        """
        assert self.precision is not None, "setup() comes first"
        self.unscale(optimizer)
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        grads = [gradient_values(parameter) for parameter in parameters]
        norms = None
        if grads and (max_norm or nonfinite != "ignore"):
            norms = gradient_norms(parameters, grads)
            if max_norm:
                # max_norm / (total + 1e-6), at most 1, as torch.nn.utils.clip_grad_norm_ has it.
                torch._foreach_mul_(grads, (norms.total + 1e-6).reciprocal_().mul_(max_norm).clamp_(max=1.0))
        if max_value:
            torch._foreach_clamp_min_(grads, -max_value)
            torch._foreach_clamp_max_(grads, max_value)
        judged = None
        if norms is not None and nonfinite == "skip":
            judged = norms.total
        elif norms is not None and nonfinite == "stop" and self._can_hold(optimizer):
            # Not finite once, not finite ever after.
            judged = norms.total if self._worst_norm is None else torch.maximum(self._worst_norm, norms.total)
            self._worst_norm, norms = judged, norms._replace(held=True)
        self._take_step(optimizer, judged)
        return norms

    def _take_step(self, optimizer: torch.optim.Optimizer, norm: torch.Tensor | None) -> None:
        """Step, unless fp16's gradients have overflowed or `norm` is not finite."""
        assert self.precision is not None
        if self.scales_gradients:
            self.precision.step(optimizer)
        elif norm is None:
            optimizer.step()
        elif _is_fused(optimizer) and not self.device_info.reads_without_sync:
            # How `torch.amp.GradScaler` tells a fused optimizer, which decides on the device.
            optimizer.found_inf = (~torch.isfinite(norm)).float()  # type: ignore[attr-defined]
            try:
                optimizer.step()
            finally:
                del optimizer.found_inf  # type: ignore[attr-defined]
        elif math.isfinite(norm.item()):
            optimizer.step()

    def _can_hold(self, optimizer: torch.optim.Optimizer) -> bool:
        # fp16's scaler leaves out steps by itself, as it looks for a scale.
        return (self.device_info.reads_without_sync or _is_fused(optimizer)) and not self.scales_gradients

    def zero_grad(self, optimizer: torch.optim.Optimizer) -> None:
        """Free the gradients (`optimizer.zero_grad` opens a profiler scope each time, which a small model feels)."""
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    # States, for checkpoints: all processes call these

    def model_state(self, model: torch.nn.Module) -> dict[str, torch.Tensor]:
        """Return the model's tensors by the user's own names, without wrappers' prefixes.

        What `device_info.to_host` and `copy_to_host` make of each is written: a tensor may stay divided until then.
        """
        return without_wrappers(self.unwrap(model)).state_dict()

    def load_model_state(self, model: torch.nn.Module, state: Mapping[str, torch.Tensor]) -> None:
        """Load tensors that `model_state` names; called file by file, so that `state` is a part of the model.

        Args:
            model: As `prepare` returned it, or the user's own.
            state: Whole tensors; the model's own ones where the file was read straight into them.
        """
        without_wrappers(self.unwrap(model)).load_state_dict(state, strict=False)

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return what a checkpoint keeps of the optimizer on the main process; the others return an empty dict.

        Raises:
            TypeError: If its `state_dict()` returns no dict.
            ValueError: If its `state_dict()` fails, or leaves out the state of an optimizer that it consists of.
        """
        return optimizer_state.optimizer_state(optimizer) if self.is_main else {}

    def load_optimizer_state(self, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
        """Load what the main process's `optimizer_state` returned, so that the next step has the same bits.

        Raises:
            ValueError: If the optimizer does not take the state, or not all of it.
        """
        optimizer_state.load_optimizer_state(optimizer, state)


def clear_frames(error: BaseException | None) -> None:
    """Drop what the functions that an error passed through held: activations, for example."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def _is_fused(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its step looks at `found_inf`; one that only calls fused optimizers does not."""
    takes_found_inf = getattr(optimizer, "_step_supports_amp_scaling", False)
    return takes_found_inf and all(group.get("fused") for group in optimizer.param_groups)
