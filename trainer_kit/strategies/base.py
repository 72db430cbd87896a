"""`Strategy`: the only piece that knows the hardware. This base runs one process; subclasses override what differs."""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import math
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import psutil
import torch

from trainer_kit.config import environment
from trainer_kit.profiling.time_ledger import Clock, HostClock
from trainer_kit.strategies.batch_shapes import ShapeLedger
from trainer_kit.strategies.grad_norms import GradientNorms, gradient_norms, gradient_values
from trainer_kit.strategies.precision import Precision
from trainer_kit.utils.pytree import move, strides_of_copy
from trainer_kit.utils.rng import seed_generators
from trainer_kit.utils.wrappers import without_wrappers

logger = logging.getLogger("trainer_kit")
T = TypeVar("T")
GIB = 2**30

_NO_MEMORY = (
    "out of memory",
    "not enough memory: you tried to allocate",
    "can't allocate memory",
    "_STATUS_ALLOC_FAILED",
)
"""What CUDA's and MPS's runtime, torch's CPU allocator, cuBLAS and cuDNN say in errors without a class of their own."""


class Strategy:
    """Device, precision and collectives of a run.

    Args:
        precision: Mixed precision; the Trainer sets it from `args.mixed_precision` where none is given.

    Attributes:
        device: Where the model and the batches go.
        rank: Number of this process among all, from 0.
        local_rank: Number of this process on its machine, from 0.
        world_size: Processes in all.
        devices: Devices that each of this process's batches is divided over; a batch has so many times
            `per_device_train_batch_size` samples.
        static_shapes: Whether each new shape of a batch costs a compilation, so that loaders avoid them.
        shapes: The shapes of the batches that were fed to the model.
        reason: Why it is this one, for people.
    """

    device: torch.device = torch.device("cpu")
    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    devices: int = 1
    static_shapes: bool = False
    reason: str = "chosen by the program"

    def __init__(self, precision: Precision | None = None) -> None:
        self.precision = precision
        self.shapes = ShapeLedger(padded=self.static_shapes)
        self._leaving = False
        self._worst_norm: torch.Tensor | None = None  # of the steps so far, where a bad one is to be the last

    @property
    def is_alone(self) -> bool:
        """Whether there are no other processes in the run."""
        return True

    @property
    def is_main(self) -> bool:
        """Whether this process writes logs and checkpoints."""
        return self.rank == 0

    @property
    def restarts(self) -> int:
        """How often a launcher has started this run anew after a failure."""
        return environment.place().restarts

    @property
    def is_local_main(self) -> bool:
        """Whether this process is the first on its machine."""
        return self.local_rank == 0

    @property
    def pins_memory(self) -> bool:
        """Whether batches reach the device faster from page-locked memory."""
        return self.device.type == "cuda"

    @property
    def reads_freely(self) -> bool:
        """Whether reading a tensor's value waits for nothing."""
        return self.device.type == "cpu"

    @property
    def copies_beside(self) -> bool:
        """Whether `copy_to_host` may be called in another thread, while the device is at work."""
        return self.device.type in ("cpu", "cuda")

    @property
    def scales_gradients(self) -> bool:
        """Whether fp16's gradient scaler is at work, which leaves out steps whose gradients overflow."""
        return self.precision is not None and self.precision.scaler is not None

    def setup(self) -> None:
        """Takes the device; called once before the model is prepared."""
        if self.precision is None:
            self.precision = Precision()
        self.precision.setup(self.device)
        self._worst_norm = None

    def teardown(self, error: BaseException | None = None) -> None:
        """Gives back what `setup` took; `error` is what ended the run, None where it ended in good order."""
        self._leaving = False  # in a notebook the process lives on, and may evaluate

    def seed(self, value: int) -> None:
        """Seeds the generators of torch (host and device), numpy and random; `value` is below 2**63.

        The loop calls it before every step with a number made from (seed, step), so that the dropout of a step
        does not depend on what happened before it: an evaluation, a restart, or another number of workers.
        """
        seed_generators(value)

    def rng_state(self) -> Any:
        """The state of the device's own generator; None where there is none beside the host's."""
        return None if self.device.type == "cpu" else torch.get_device_module(self.device).get_rng_state()

    def set_rng_state(self, state: Any) -> None:
        """Sets it again; one of another kind of device is left out."""
        if isinstance(state, torch.Tensor) and self.device.type != "cpu":
            torch.get_device_module(self.device).set_rng_state(state)

    def prepare(self, model: torch.nn.Module) -> torch.nn.Module:
        """Moves the model to the device, in place, and returns what the loop calls.

        Raises:
            ValueError: If the model has no weights yet (they are on the meta device).
        """
        empty = next((name for name, value in model.state_dict().items() if getattr(value, "is_meta", False)), None)
        if empty is not None:
            raise ValueError(f"{empty} is on the meta device, without a value; make or load the model on a real device")
        return model.to(self.device)

    def recompute_activations(self, model: torch.nn.Module) -> None:
        """Turns on the model's own activation checkpointing (transformers 5 renamed the method).

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
        """Has the model compiled by torch.compile when it is called first."""
        model.compile()

    def forget_models(self) -> None:
        """Lets go of all models that were prepared."""

    def empty_cache(self) -> None:
        """Gives memory that the device keeps for reuse back to it."""
        if self.device.type != "cpu":
            torch.get_device_module(self.device).empty_cache()

    def unwrap(self, model: torch.nn.Module) -> torch.nn.Module:
        """The user's own module under what `prepare` returned."""
        return model

    def prepare_loader(self, windows: Iterable[T]) -> Iterator[T]:
        """An iterator over `windows` (whose tensors may be moved to the device ahead of their use)."""
        return iter(windows)

    def to_device(self, batch: Any) -> Any:
        """The batch with its tensors on the device; its shapes are recorded."""
        self.shapes.record(batch)
        return move(batch, self.device, non_blocking=self.pins_memory)

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """The context of a forward pass."""
        assert self.precision is not None, "setup() comes first"
        return self.precision.autocast(self.device)

    def no_sync(self, model: torch.nn.Module) -> contextlib.AbstractContextManager[Any]:
        """The context of every micro-batch but a step's last: gradients stay on this process."""
        return contextlib.nullcontext()

    def exchange_later(self, later: bool) -> None:
        """Whether gradients are exchanged by `exchange`, not in a step's last backward pass; called before `prepare`.

        A process may leave a backward pass early then: no other waits for it there.

        Raises:
            ValueError: If that is not possible here.
        """

    def exchange(self, model: torch.nn.Module) -> None:
        """Makes the gradients those of all processes, where `exchange_later` asked for that."""

    def lack_of_memory(self, error: BaseException) -> str | None:
        """What an error says for want of memory for a tensor, in one line; None of another error."""
        is_told = isinstance(error, RuntimeError) and any(text in str(error) for text in _NO_MEMORY)
        if not is_told and not isinstance(error, (torch.OutOfMemoryError, MemoryError)):
            return None
        return str(error).partition("\n")[0] or type(error).__name__

    def free_memory(self) -> int:
        """Bytes that tensors can still take on the device.

        Of a host's memory a tenth is left to others: where nothing is left, the system ends a process.
        """
        return int(psutil.virtual_memory().available * 0.9)

    def backward(self, loss: torch.Tensor, **options: Any) -> None:
        """Backpropagates this process's share of the step's loss; gradients add up to the sum over all processes.

        Args:
            loss: A number with gradients.
            options: Arguments of `torch.Tensor.backward`.
        """
        assert self.precision is not None, "setup() comes first"
        self.precision.scaled(loss).backward(**options)

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Takes fp16's scale out of the gradients, for whoever looks at them before `step`; once a step."""
        assert self.precision is not None, "setup() comes first"
        self.precision.unscale(optimizer)

    def step(
        self,
        optimizer: torch.optim.Optimizer,
        max_norm: float | None = None,
        max_value: float | None = None,
        nonfinite: str = "ignore",
    ) -> GradientNorms | None:
        """Clips the gradients and steps the optimizer, without waiting for the device.

        Args:
            optimizer: Its `.grad`s are complete.
            max_norm: Largest norm of all gradients together; None or 0 leaves them as they are.
            max_value: Largest absolute value of a gradient's element; None or 0 leaves them as they are.
            nonfinite: With "skip", a step whose gradients are not finite leaves weights and optimizer as they are.
                Fused optimizers decide that on the device; for others the host has to read the norm. With "stop" all
                later steps leave them too, where that costs no waiting: whoever looks at the run finds them as they
                were before the bad step.

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
        """Steps, unless fp16's gradients have overflowed or `norm` is not finite."""
        assert self.precision is not None
        if self.scales_gradients:
            self.precision.step(optimizer)
        elif norm is None:
            optimizer.step()
        elif _is_fused(optimizer) and not self.reads_freely:
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
        return (self.reads_freely or _is_fused(optimizer)) and not self.scales_gradients

    def clear_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """Frees the gradients (`optimizer.zero_grad` opens a profiler scope each time, which a small model feels)."""
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """The optimizer for the prepared model; one that was made before `prepare` holds the prepared parameters."""
        return optimizer

    def prepared_parameters(self, parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """The parameters, with those in place of others that `prepare` has replaced."""
        return list(parameters)

    def operand(self, number: int) -> Any:
        """A number that a step computes with, in the form in which its value does not change the computation."""
        return number

    def whole(self, outputs: Any) -> Any:
        """A model's outputs for the host to read, put together where several devices hold parts of them."""
        return outputs

    def dispatch(self) -> None:
        """Lets the device begin with what was recorded so far, where computations are recorded first."""

    def read(self, scalars: Sequence[torch.Tensor], summed: bool = False) -> list[float]:
        """The values of tensors without dimensions that lie on the device; waits for it once.

        Args:
            scalars: All of one dtype; as many on all processes where they are to be summed.
            summed: Sum each over all processes.
        """
        if not scalars:
            return []
        stacked = torch.stack([*scalars])
        values: list[float] = (self.all_reduce(stacked) if summed else stacked).tolist()
        return values

    def compilations(self) -> tuple[int, float]:
        """How many computations this process has compiled so far, and the seconds that took.

        Here they are those of torch.compile, whose modules are not imported to count nothing.
        """
        dynamo = sys.modules.get("torch._dynamo.utils")
        if dynamo is None or not dynamo.counters["stats"]["unique_graphs"]:
            return 0, 0.0
        return dynamo.counters["stats"]["unique_graphs"], float(dynamo.calculate_time_spent()["total_wall_time"])

    def all_reduce(self, tensor: torch.Tensor, op: str = "sum") -> torch.Tensor:
        """The tensor summed ("sum") or its maximum ("max") taken over all processes."""
        return tensor

    def sum_numbers(self, numbers: Sequence[int]) -> Sequence[int]:
        """Each of the whole numbers (below 2**63), which lie on the host, summed over all processes."""
        return numbers

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """The processes' tensors joined along the first dimension, in order of rank; lengths may differ."""
        return tensor

    def gather_object(self, value: T) -> list[T]:
        """The processes' values, anything that can be pickled, in order of rank; all processes get them."""
        return [value]

    def gather_to_main(self, value: T) -> list[T]:
        """The same on the main process alone; the others, which need no memory for it, get an empty list."""
        return [value]

    def broadcast(self, value: T) -> T:
        """The main process's value."""
        return value

    def barrier(self) -> None:
        """Waits until all processes are here."""

    def on_main(self, function: Callable[[], T]) -> T:
        """Calls `function` on the main process alone; every process gets what it returns, or raises what it raises."""
        return function()

    def check_same(self, facts: Mapping[str, Any]) -> None:
        """Compares facts by name, which must be the same on all processes, and come in the same order.

        Raises:
            ValueError: Naming the first process that differs from the main one, the fact and both values; where only
                the order differs, the first two names that do.
        """

    @property
    def leaving(self) -> bool:
        """Whether some process of the run was told to leave; others hear of it within seconds, at no cost."""
        return self._leaving

    def announce_leaving(self) -> None:
        """Tells all processes that this one was told to leave (a signal), so that long work can be broken off."""
        self._leaving = True

    def before_aborting(self, duty: Callable[[], object] | None) -> None:
        """Has `duty` called, in a thread, if this process must end where it stands: it waits for one that is lost."""

    def local_copy(self, directory: Path) -> Path:
        """A folder that the main process can read, as this process can read it; all processes take part."""
        return directory

    def release_copies(self) -> None:
        """Removes what `local_copy` made, once all processes have read it; all take part."""

    def announce_output(self, directory: Path) -> None:
        """Says which machines see the folder that the main process writes to, if there are several; all take part."""

    def report_progress(self, step: int) -> None:
        """Tells this machine's launcher, who may start the run anew, that it could go on from this step."""
        path = environment.progress_file()
        if path is not None and self.is_local_main:
            new = Path(f"{path}.new")
            try:
                new.write_text(f"{step}\n")
                os.replace(new, path)
            except OSError as error:
                logger.warning("the checkpoint of step %d could not be reported to the launcher: %s", step, error)

    def model_state(self, model: torch.nn.Module) -> dict[str, torch.Tensor]:
        """The whole model's state under the user's own names, without wrappers' prefixes; all processes take part."""
        return without_wrappers(self.unwrap(model)).state_dict()

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of a model or an optimizer on the host, whole."""
        return tensor.cpu()

    def host_memory(self, tensors: Iterable[torch.Tensor], free: Iterable[torch.Tensor] = ()) -> list[torch.Tensor]:
        """Memory on the host for a copy of each tensor; that of `free`, which nobody needs any more, where it fits."""
        places: dict[Any, list[torch.Tensor]] = {}
        for place in free:
            places.setdefault((place.shape, place.dtype, place.stride()), []).append(place)
        return [
            found.pop()
            if (found := places.get((tensor.shape, tensor.dtype, strides)))
            else torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, pin_memory=self.pins_memory)
            for tensor in tensors
            for strides in [strides_of_copy(tensor)]  # other strides would need a second copy on the device
        ]

    def moment(self) -> Any:
        """What was given to the device by now, for `copy_to_host` in another thread; None where it need not know."""
        return torch.get_device_module(self.device).current_stream().record_event() if self.pins_memory else None

    def copy_to_host(self, tensors: Sequence[torch.Tensor], places: Sequence[torch.Tensor], moment: Any = None) -> None:
        """Copies tensors, whole, and waits until they are there.

        Args:
            tensors: Of a model or an optimizer, on any device.
            places: Where to, as `host_memory` gives them.
            moment: After which they are to be copied, beside what the device was given since; None: after everything.
        """
        stream: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        if moment is not None:
            module = torch.get_device_module(self.device)
            side = module.Stream(self.device)
            side.wait_event(moment)
            stream = module.stream(side)
        with stream:
            if tensors:
                torch._foreach_copy_([*places], [each.detach() for each in tensors], non_blocking=self.pins_memory)
            if self.pins_memory:
                torch.get_device_module(self.device).current_stream(self.device).synchronize()

    def clock(self) -> Clock:
        """What tells how long the device takes."""
        return HostClock()

    def memory(self) -> dict[str, float]:
        """Memory in GiB: `memory_gib` in use now and `peak_memory_gib` since the start of the process.

        Here it is the resident set of the process, whose peak the operating system keeps.
        """
        info = _process(os.getpid()).memory_info()
        peak = max(info.rss, _peak_resident_bytes(info))
        return {"memory_gib": info.rss / GIB, "peak_memory_gib": peak / GIB}


def clear_frames(error: BaseException | None) -> None:
    """Lets go of what the functions that an error came through held: activations, for example."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def _is_fused(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its step looks at `found_inf`; one that only calls fused optimizers does not."""
    takes_found_inf = getattr(optimizer, "_step_supports_amp_scaling", False)
    return takes_found_inf and all(group.get("fused") for group in optimizer.param_groups)


@functools.cache
def _process(number: int) -> psutil.Process:
    """This process, by a number that a fork changes; looking it up costs more than asking it."""
    return psutil.Process(number)


def _peak_resident_bytes(info: Any) -> int:
    """Peak resident set: psutil has it on Windows, the resource module elsewhere (KiB on Linux, bytes on macOS)."""
    if hasattr(info, "peak_wset"):
        return int(info.peak_wset)
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(peak if psutil.MACOS else peak * 1024)
