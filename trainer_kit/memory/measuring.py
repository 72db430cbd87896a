"""`measure`: the memory of a training step, found by taking it."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import torch

from trainer_kit.arguments import TrainingArguments
from trainer_kit.loss import ComputeLoss
from trainer_kit.memory.anatomy import KINDS, Anatomy, Component
from trainer_kit.memory.cuda import GRANULARITY
from trainer_kit.memory.estimation import make_anatomy
from trainer_kit.memory.step import Step
from trainer_kit.memory.tracker import Tracker
from trainer_kit.optim import make_optimizer
from trainer_kit.precision import Precision
from trainer_kit.strategies.base import generators_kept
from trainer_kit.strategies.single import SingleDevice


def measure(
    model: torch.nn.Module,
    args: TrainingArguments,
    batch: Any,
    *,
    compute_loss: ComputeLoss | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    device: str | torch.device = "cpu",
) -> Anatomy:
    """The memory of an optimizer step on this device, measured.

    Three steps are taken, on a copy of the model: the first makes the optimizer's state; in the second the allocator
    tells the peak (torch's profiler on a CPU, `torch.cuda.max_memory_allocated` on a GPU); in the third every
    storage is followed, for the components. What operators take for themselves is seen in the second alone, and counts
    as temporary.

    Args:
        model: With its weights; it stays as it is.
        args: The arguments of the run.
        batch: A micro-batch.
        compute_loss: As the Trainer takes it.
        optimizer: Of the model; default: as `args.optim` says.
        device: "cpu", or "cuda" with or without an index.

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
        if args.gradient_checkpointing:
            strategy.recompute_activations(copied)
        made = made if made is not None else make_optimizer(copied, args)
        step = Step(copied, made, args, strategy.to_device(batch), compute_loss, strategy)
        step()
        peak = peak_on_cuda(step) - before if place.type == "cuda" else peak_on_cpu(step)
        tracker = Tracker(GRANULARITY if place.type == "cuda" else 1)
        step.track(tracker)
        tracker.close()
    found = tracker.peak()
    found["temporary"] = peak - sum(nbytes for kind, nbytes in found.items() if kind != "temporary")
    how = "torch.cuda.max_memory_allocated" if place.type == "cuda" else "torch.profiler"
    components = [
        Component(
            kind, found[kind], f"peak by {how}, " * (kind == "temporary") + f"followed in a real step: {KINDS[kind]}"
        )
        for kind in KINDS
        if kind in found
    ]
    return make_anatomy(components, model, batch, place)


def peak_on_cuda(step: Step) -> int:
    """The most that is allocated while the step is taken, all that was there before included."""
    device = step.strategy.device
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    step()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device)


def peak_on_cpu(step: Step) -> int:
    """What is held before the step, and the most that is allocated beside it while it is taken."""
    held = {each.untyped_storage()._cdata: each for kind in step.held().values() for each in kind}
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    recorded: Any = profiler.profiler
    events = [event for event in recorded.kineto_results.events() if event.name() == "[memory]"]
    sizes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    most = max(itertools.accumulate(sizes), default=0)  # what is given back counts below 0
    return sum(each.untyped_storage().nbytes() for each in held.values()) + most
