"""`measure`: the memory of a training step, found by taking it."""

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
from trainer_kit.memory.tracker import Tracker
from trainer_kit.optim import make_optimizer
from trainer_kit.strategies.device_info import GIB
from trainer_kit.strategies.precision import Precision
from trainer_kit.strategies.single import SingleDevice
from trainer_kit.utils.rng import generators_kept

# What the profiler's libraries write to the process's stderr, which no setting keeps them from.
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
    """The memory of an optimizer step on this device, measured.

    Three steps are taken, on a copy of the model: the first makes the optimizer's state; in the second the allocator
    tells the peak (torch's profiler on a CPU, `torch.cuda.max_memory_allocated` on a GPU); in the third every
    storage is followed, for the components. What operators take for themselves is seen in the second alone, and counts
    as temporary. On a GPU, what libraries keep from step to step is the runtime's, and so is the CUDA context where
    NVML tells it (see `Strategy.memory`).

    Args:
        model: With its weights; it stays as it is.
        args: The arguments of the run.
        batch: A micro-batch.
        compute_loss: As the Trainer takes it.
        optimizer: Of the model; default: as `args.optim` says.
        device: "cpu", or "cuda" with or without an index.
        inference: Measures a forward pass without gradients instead, as `estimate` has it.

    Raises:
        ValueError: If the device's allocator does not tell what it gives out, or the model gives no loss.
    """
    place = torch.device(device)
    if place.type not in ("cpu", "cuda"):
        raise ValueError(f"device={str(device)!r} cannot be measured; use 'cpu' or 'cuda'")
    before = torch.cuda.memory_allocated(place) if place.type == "cuda" else 0
    copied, made = copy.deepcopy((model, optimizer))
    strategy = SingleDevice(place, Precision(args.mixed_precision))
    with generators_kept(strategy.device):
        strategy.setup()
        copied = strategy.prepare(copied).train()
        if args.gradient_checkpointing and not inference:
            strategy.enable_activation_checkpointing(copied)
        step: Step | Inference
        if inference:
            step = Inference(copied, strategy.to_device(batch), compute_loss, strategy)
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
    allocator = "torch.cuda.max_memory_allocated" if place.type == "cuda" else "torch.profiler"
    sources = {
        **dict.fromkeys(KINDS, "followed in a real step"),
        "temporary": f"peak by {allocator}, without what was followed in a real step",
        "runtime": "torch.cuda.memory_allocated between steps, without tensors; the context by NVML",
    }
    components = [Component(kind, found[kind], f"{sources[kind]}: {KINDS[kind]}") for kind in KINDS if found.get(kind)]
    return make_anatomy(components, model, batch, place, inference)


class Runtime(NamedTuple):
    """Bytes that a GPU's runtime takes beside the tensors.

    Attributes:
        kept: By libraries, given out by torch's allocator (cuBLAS's workspaces).
        context: By CUDA itself; 0 where NVML does not tell what this process takes.
    """

    kept: int
    context: int


def runtime_on_cuda(step: Step | Inference, before: int) -> Runtime:
    """What is there between two steps.

    Args:
        step: Was taken once.
        before: Bytes that were allocated before anything of the step was.
    """
    kept = torch.cuda.memory_allocated(step.strategy.device) - before - _held(step, GRANULARITY)
    figures = step.strategy.device_info.memory()
    reserved = figures["reserved_memory_gib"]
    context = figures.get("process_memory_gib", reserved) - reserved
    return Runtime(max(0, kept), max(0, round(context * GIB)))


def peak_on_cuda(step: Step | Inference) -> int:
    """The most that is allocated while the step is taken, all that was there before included."""
    device = step.strategy.device
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    step()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device)


def peak_on_cpu(step: Step | Inference) -> int:
    """What is held before the step, and the most that is allocated beside it while it is taken."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with _without_notices(), torch.profiler.profile(activities=activities, profile_memory=True) as profiler:
        step()
    recorded: Any = profiler.profiler
    events = [event for event in recorded.kineto_results.events() if event.name() == "[memory]"]
    sizes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    most = max(itertools.accumulate(sizes), default=0)  # what is given back counts below 0
    return _held(step) + most


def _held(step: Step | Inference, granularity: int = 1) -> int:
    """Bytes that are held between steps, each storage in multiples of the granularity."""
    sizes: dict[int, int] = {}
    for tensor in itertools.chain(*step.held().values()):
        storage = tensor.untyped_storage()
        sizes[storage._cdata] = -(-storage.nbytes() // granularity) * granularity
    return sum(sizes.values())


@contextlib.contextmanager
def _without_notices() -> Iterator[None]:
    """Has what is written to the process's stderr meanwhile come afterwards, without the profiler's own notices."""
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
