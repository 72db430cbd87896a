"""`measure`: the memory of a training step, measured in a real step."""

from __future__ import annotations

import contextlib
import copy
import itertools
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from trainer_kit.config.arguments import TrainingArguments
from trainer_kit.loss.loss import ComputeLoss
from trainer_kit.memory.anatomy import KINDS, Anatomy, Component
from trainer_kit.memory.cuda import GRANULARITY
from trainer_kit.memory.estimation import make_anatomy
from trainer_kit.memory.step import Inference, Step
from trainer_kit.memory.substitutes import Substitutes
from trainer_kit.memory.tracker import Tracker
from trainer_kit.optim import make_optimizer
from trainer_kit.strategies.precision import Precision
from trainer_kit.strategies.recomputation import without_comparisons
from trainer_kit.strategies.single import SingleDevice
from trainer_kit.utils.optimizer_state import copied_optimizer
from trainer_kit.utils.rng import generators_kept
from trainer_kit.utils.units import GIB

# Messages that the profiler's libraries write to stderr, and that no setting disables.
_NOTICE = re.compile(rb"USDT:|.*CPUAllocator\.cpp.*Memory block of unknown size")


def measure(
    model: torch.nn.Module,
    args: TrainingArguments,
    batch: Any,
    *,
    compute_loss: ComputeLoss | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    device: str | torch.device = "cpu",
    inference: bool = False,
) -> Anatomy:
    """Measure the peak memory of an optimizer step on this device.

    Three steps are taken on a copy of the model. The first allocates the optimizer's state. The second records the
    allocator's peak (torch's profiler on a CPU, `torch.cuda.max_memory_allocated` on a GPU). The third tracks every
    storage, for the components. Only the second includes the operators' internal memory, which counts as temporary. On
    a GPU, memory that libraries keep between steps counts as runtime, and so does the CUDA context where NVML reports
    it (see `Strategy.device_info`).

    Args:
        model: Model with its weights; it stays unchanged.
        args: Arguments of the run.
        batch: A micro-batch.
        compute_loss: Loss function as for the Trainer; None for the model's own loss.
        optimizer: Optimizer of the model; None for the one that `args.optim` selects.
        device: "cpu", or "cuda" with or without an index.
        inference: Whether to measure a forward pass without gradients instead, as in `estimate`.

    Returns:
        The memory at the peak, by component.

    Raises:
        ValueError: If the device's allocator does not report its allocations, or the model returns no loss.
    """
    place = torch.device(device)
    if place.type not in ("cpu", "cuda"):
        raise ValueError(f"device={str(device)!r} cannot be measured; use 'cpu' or 'cuda'")
    substitutes = Substitutes(compute_loss, model, copy.deepcopy)
    before = torch.cuda.memory_allocated(place) if place.type == "cuda" else 0
    copies: dict[int, Any] = {}
    copied, made = copy.deepcopy(model, copies), optimizer and copied_optimizer(optimizer, copies)
    strategy = SingleDevice(place, Precision(args.mixed_precision))
    with generators_kept(strategy.device), without_comparisons(), substitutes.in_place():
        strategy.setup()
        copied = strategy.prepare(copied).train()
        if (options := args.checkpointing_options) is not None and not inference:
            strategy.enable_activation_checkpointing(copied, options)
        if inference:
            step: Step | Inference = Inference(copied, strategy.to_device(batch), compute_loss, strategy)
        else:
            made = made if made is not None else make_optimizer(copied, args)
            step = Step(copied, made, args, strategy.to_device(batch), compute_loss, strategy)
        step()
        runtime = runtime_on_cuda(step, before) if place.type == "cuda" else Runtime(0, 0)
        peak = runtime.context + (peak_on_cuda(step) - before if place.type == "cuda" else peak_on_cpu(step))
        tracker = Tracker(GRANULARITY if place.type == "cuda" else 1)
        step.track(tracker)
        tracker.close()
    found = {**tracker.peak(), "runtime": sum(runtime)}
    found["temporary"] = peak - sum(nbytes for kind, nbytes in found.items() if kind != "temporary")
    return make_anatomy(_components(found, place.type), model, batch, place, inference)


def _components(found: dict[str, int], device_type: str) -> list[Component]:
    allocator = "torch.cuda.max_memory_allocated" if device_type == "cuda" else "torch.profiler"
    sources = {
        **dict.fromkeys(KINDS, "followed in a real step"),
        "temporary": f"peak by {allocator}, without what was followed in a real step",
        "runtime": "torch.cuda.memory_allocated between steps, without tensors; the context by NVML",
    }
    return [Component(kind, found[kind], f"{sources[kind]}: {KINDS[kind]}") for kind in KINDS if found.get(kind)]


class Runtime(NamedTuple):
    """Memory of a GPU's runtime in addition to the tensors.

    Attributes:
        kept: Bytes that libraries keep from torch's allocator (cuBLAS workspaces).
        context: Bytes of the CUDA context; 0 if NVML does not report this process.
    """

    kept: int
    context: int


def runtime_on_cuda(step: Step | Inference, before: int) -> Runtime:
    """Measure the runtime's memory between two steps.

    Args:
        step: Step that was taken once.
        before: Bytes that were allocated before the step's tensors.
    """
    kept = torch.cuda.memory_allocated(step.strategy.device) - before - _held(step, GRANULARITY)
    figures = step.strategy.device_info.memory()
    reserved = figures["reserved_memory_gib"]
    context = figures.get("process_memory_gib", reserved) - reserved
    return Runtime(max(0, kept), max(0, round(context * GIB)))


def peak_on_cuda(step: Step | Inference) -> int:
    """Take the step and return its peak of allocated bytes, including those allocated before."""
    device = step.strategy.device
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    step()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device)


def peak_on_cpu(step: Step | Inference) -> int:
    """Take the step and return the bytes held before it plus the peak of allocations in it."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with _without_notices(), torch.profiler.profile(activities=activities, profile_memory=True) as profiler:
        step()
    recorded: Any = profiler.profiler
    events = [event for event in recorded.kineto_results.events() if event.name() == "[memory]"]
    sizes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    most = max(itertools.accumulate(sizes), default=0)  # releases have negative sizes
    return _held(step) + most


def _held(step: Step | Inference, granularity: int = 1) -> int:
    """Return the bytes held between steps, each storage rounded up to the granularity."""
    sizes: dict[int, int] = {}
    for tensor in itertools.chain(*step.held().values()):
        storage = tensor.untyped_storage()
        sizes[storage._cdata] = -(-storage.nbytes() // granularity) * granularity
    return sum(sizes.values())


@contextlib.contextmanager
def _without_notices() -> Iterator[None]:
    """Delay output to the process's stderr, and remove the profiler's messages from it."""
    sys.stderr.flush()
    with tempfile.TemporaryFile() as kept:
        stderr = os.dup(2)
        os.dup2(kept.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(stderr, 2)
            os.close(stderr)
            kept.seek(0)
            for line in kept:
                if not _NOTICE.match(line):
                    os.write(2, line)
