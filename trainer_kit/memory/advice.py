"""`advise`: the largest batch that fits into a device's memory, and estimated savings of each option."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from trainer_kit.config.arguments import TrainingArguments
from trainer_kit.loss.batch import samples_of
from trainer_kit.loss.loss import ComputeLoss
from trainer_kit.memory.anatomy import Anatomy
from trainer_kit.memory.estimation import estimate
from trainer_kit.memory.fakes import MOST_KNOWN, Fakes
from trainer_kit.run import Run
from trainer_kit.utils.pytree import map_tensors
from trainer_kit.utils.units import format_count, format_size, parse_size

LARGEST = 2**16
"""The largest batch size that is tried."""

_TRIES = 16
_LEAP = 64
"""Largest factor between a tried batch size and the largest that is known to fit."""


class Option(NamedTuple):
    """A way to reduce memory, with its estimate.

    Attributes:
        name: Description, with the changed arguments if there are any.
        changes: Changed arguments and their values; empty for a change to the model.
        peak: Bytes at the peak with the change.
        fits: Whether the peak fits into the device; None if its memory is unknown.
    """

    name: str
    changes: dict[str, Any]
    peak: int
    fits: bool | None


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Memory of a training, and ways to reduce it.

    Attributes:
        anatomy: Memory of the requested step.
        device_memory: Bytes of the device; None if unknown.
        largest_batch_size: Samples of the largest micro-batch that fits, at most 65,536; 0 if none fits. None if the
            device's memory is unknown, or the first dimension of the batch's tensors is not its samples.
        options: Options that need less memory, smallest peak first.
    """

    anatomy: Anatomy
    device_memory: int | None
    largest_batch_size: int | None
    options: tuple[Option, ...]

    @property
    def fits(self) -> bool | None:
        """Whether the step fits into the device; None if its memory is unknown."""
        return None if self.device_memory is None else self.anatomy.peak <= self.device_memory

    def table(self) -> str:
        """Format the estimate as text."""
        lines = [self.anatomy.table(), "", self._verdict()]
        if self.options:
            width = max(len(option.name) for option in self.options)
            lines += ["", f"{'options that need less':<{width}}{'peak':>12}{'saved':>12}"]
        for option in self.options:
            fits = {None: "", True: "  fits", False: "  does not fit"}[option.fits]
            saved = format_size(self.anatomy.peak - option.peak)
            lines.append(f"{option.name:<{width}}{format_size(option.peak):>12}{saved:>12}{fits}")
        return "\n".join(lines)

    def _verdict(self) -> str:
        peak = format_size(self.anatomy.peak)
        if self.device_memory is None:
            return (
                f"needs {peak}; whether it fits is not known without the device's memory: give --device-memory, such "
                "as 24GiB, or device_memory in Python"
            )
        fits = f"{peak} {'fits' if self.fits else 'does not fit'} into {format_size(self.device_memory)}"
        if self.largest_batch_size is None:
            return f"{fits}; the largest micro-batch is unknown: the batch's tensors do not begin with its samples"
        found = self.largest_batch_size
        samples = format_count(found, "sample")
        largest = f"the largest micro-batch that fits is {samples}" if found else "no micro-batch fits"
        return f"{fits}; {largest}{' or more' if found == LARGEST else ''}"

    def to_dict(self) -> dict[str, Any]:
        """Return the estimate as JSON-compatible values."""
        return {
            "anatomy": self.anatomy.to_dict(),
            "device_memory": self.device_memory,
            "fits": self.fits,
            "largest_batch_size": self.largest_batch_size,
            "options": [option._asdict() for option in self.options],
        }


def advise(
    model: torch.nn.Module,
    args: TrainingArguments,
    batch: Any,
    *,
    device_memory: int | str | None = None,
    compute_loss: ComputeLoss | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    device: str | torch.device = "cpu",
    world_size: int = 1,
    fsdp: int = 1,
    samples: int | None = None,
) -> Estimate:
    """Estimate a step, the largest micro-batch that fits, and the saving of each option.

    Args:
        model: Model, as for `trainer_kit.memory.estimate`.
        args: Arguments of the run.
        batch: A micro-batch.
        device_memory: Bytes, or a string such as "24GiB"; None for that of the device, if it is present.
        compute_loss: Loss function as for the Trainer; None for the model's own loss.
        optimizer: Optimizer of the model; None for the one that `args.optim` selects.
        device: Device to train on.
        world_size: Number of processes of the run.
        fsdp: Number of processes over which the model is sharded, as for `trainer_kit.memory.estimate`.
        samples: Number of samples in the batch; None for the first dimension of its tensors. Other batch sizes are not
            estimated if the two differ (graphs).

    Returns:
        The estimate and the options.

    Raises:
        ValueError: If `device_memory` is no size, or `estimate` raises it.
    """
    limit = parse_size(device_memory, "device_memory") if device_memory is not None else capacity(torch.device(device))

    def estimated(model: Any = model, args: Any = args, batch: Any = batch, optimizer: Any = optimizer) -> Anatomy:
        return estimate(
            model, args, batch, compute_loss=compute_loss, optimizer=optimizer, device=device, world_size=world_size,
            fsdp=fsdp,
        )  # fmt: skip

    anatomy = estimated()
    by_samples = samples in (None, anatomy.batch_size)
    if samples is not None:
        anatomy = dataclasses.replace(anatomy, batch_size=samples)
    largest = None
    if limit is not None and by_samples:
        known = {anatomy.batch_size: anatomy.peak}
        largest = largest_batch(functools.partial(_peak_of, estimated, batch, limit), known, limit)
    tried = functools.partial(_try, estimated, args, limit)
    found = [
        *_other_arguments(args, optimizer, tried, anatomy.peak),
        _smaller_batch(args, batch, largest, tried) if by_samples else None,
        _frozen(model, optimizer, tried),
    ]
    options = {option.name: option for option in found if option is not None and option.peak < anatomy.peak}
    return Estimate(anatomy, limit, largest, tuple(sorted(options.values(), key=lambda option: option.peak)))


def _peak_of(estimated: Callable[..., Anatomy], batch: Any, limit: int, samples: int) -> int:
    """Return the peak of a batch of this size, or more than the limit for a single sample that the model refuses."""
    try:
        return estimated(batch=resized(batch, samples)).peak
    except ValueError:  # a batch norm needs two samples
        if samples > 1:
            raise
        return limit + 1


def _try(
    estimated: Callable[..., Anatomy],
    args: TrainingArguments,
    limit: int | None,
    changes: dict[str, Any],
    text: str = "",
    **given: Any,
) -> Option | None:
    """Estimate a change; return None if it is impossible."""
    try:
        nbytes = estimated(args=dataclasses.replace(args, **changes), **given).peak
    except ValueError:  # the model has no activation checkpointing, or a batch norm needs two samples
        return None
    name = text or ", ".join(f"{name}={value!r}" for name, value in changes.items())
    return Option(name, changes, nbytes, None if limit is None else nbytes <= limit)


def advise_run(
    run: Run,
    batch: Any,
    samples: int,
    compute_loss: ComputeLoss | None,
    optimizer: torch.optim.Optimizer | None,
    device_memory: int | str | None,
) -> Estimate:
    """Run `advise` for one micro-batch of a run.

    Args:
        run: The run.
        batch: A micro-batch.
        samples: Number of samples in the batch.
        compute_loss: The user's loss function; None for the model's own loss.
        optimizer: The user's optimizer; None for the one that `args.optim` selects.
        device_memory: Bytes, or a string such as "24GiB"; None for that of the device, if it is present.
    """
    processes = run.strategy.world_size
    return advise(
        run.model, run.args, batch, device_memory=device_memory, compute_loss=compute_loss, optimizer=optimizer,
        device=run.strategy.device, world_size=processes, fsdp=run.strategy.sharding.count_shards(processes),
        samples=samples,
    )  # fmt: skip


def capacity(device: torch.device) -> int | None:
    """Return the bytes of a device's memory; None if the device is absent or does not report it.

    Args:
        device: Device to query.
    """
    if device.type == "cpu":
        import psutil  # takes 6 ms

        return int(psutil.virtual_memory().total)
    if device.type == "cuda" and torch.cuda.is_available():
        return int(torch.cuda.get_device_properties(device).total_memory)
    if device.type == "mps" and torch.backends.mps.is_available():
        return int(torch.mps.recommended_max_memory())
    return None


def resized(batch: Any, samples: int) -> Any:
    """Return a batch with another number of samples: integer tensors are repeated, others are on the device "meta".

    Args:
        batch: A micro-batch.
        samples: Number of samples of the result.
    """
    present = samples_of(batch)

    def other(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.ndim == 0 or tensor.shape[0] != present:
            return tensor
        shape = (samples, *tensor.shape[1:])
        if tensor.is_floating_point() or tensor.is_complex() or tensor.is_meta or math.prod(shape) > MOST_KNOWN:
            return torch.empty(shape, dtype=tensor.dtype, device="meta")
        return tensor[torch.arange(samples, device=tensor.device) % present]

    return map_tensors(other, batch)


def largest_batch(peak: Callable[[int], int], known: dict[int, int], limit: int) -> int:
    """Return the largest batch size whose peak is within the limit, at most `LARGEST`; 0 if none is.

    The memory at each moment of a step is linear in the batch size, and the peak is their maximum, hence convex.
    Between two known sizes it lies below the line through them, and beyond them above it, so that few estimates
    suffice.

    Args:
        peak: Estimates the peak of a batch size, in bytes.
        known: Peaks by batch size, at least one; new estimates are added.
        limit: Largest allowed peak, in bytes.
    """
    for number in range(_TRIES):
        fitting = sorted(samples for samples, nbytes in known.items() if nbytes <= limit)
        others = sorted(samples for samples, nbytes in known.items() if nbytes > limit)
        low, high = max(fitting, default=0), min(others, default=LARGEST + 1)
        beyond = [_crossing(known, pair[0], pair[1], limit) for pair in (fitting[-2:], others[:2]) if len(pair) == 2]
        if high - low <= 1 or min(beyond, default=high) < low + 1:
            return low
        if fitting and others:  # where the slope changes, interpolation alone converges slowly
            guess = math.sqrt(low * high) if number % 2 else _crossing(known, low, high, limit)
        else:
            guess = min(beyond[0], _LEAP * low or high) if beyond else 2 * low or high / 2
        guess = min(max(int(guess), low + 1), high - 1)
        known[guess] = peak(guess)
    return max((samples for samples, nbytes in known.items() if nbytes <= limit), default=0)


def _crossing(known: dict[int, int], one: int, two: int, limit: int) -> float:
    """Return the batch size at which the line through two known peaks reaches the limit."""
    each = (known[two] - known[one]) / (two - one)
    return one + (limit - known[one]) / each if each > 0 else LARGEST + 1


def _other_arguments(
    args: TrainingArguments, optimizer: torch.optim.Optimizer | None, tried: Callable[..., Option | None], peak: int
) -> list[Option]:
    """Try each argument alone, and the combination to which each adds a saving."""
    changes: list[dict[str, Any]] = []
    if args.mixed_precision == "no":
        changes.append({"mixed_precision": "bf16"})
    if args.optim == "adamw_torch" and optimizer is None:
        changes.append({"optim": "adamw_8bit"})
    if args.gradient_checkpointing is False:
        changes += [{"gradient_checkpointing": True}, {"gradient_checkpointing": {"policy": "save_matmuls"}}]
    if not args.chunked_cross_entropy:
        changes.append({"chunked_cross_entropy": True})
    found = [option for change in changes if (option := tried(change)) is not None]
    found.sort(key=lambda option: option.peak)
    together = None
    for option in found:
        if together is not None and together.changes.keys() & option.changes.keys():
            continue
        both = {**option.changes, **(together.changes if together else {})}
        order = [name for change in changes for name in change]
        more = option if together is None else tried({name: both[name] for name in sorted(both, key=order.index)})
        if more is not None and more.peak < (peak if together is None else together.peak):
            together = more
    return found if together is None else [*found, together]


def _smaller_batch(
    args: TrainingArguments, batch: Any, largest: int | None, tried: Callable[..., Option | None]
) -> Option | None:
    """Try the largest divisor of the batch that fits, with correspondingly more micro-batches."""
    present = samples_of(batch)
    most = present // 2 if largest is None else max(1, min(largest, present // 2))
    smallest = None
    for size in range(most, 0, -1):
        if present % size == 0 and present > 1:
            steps = args.gradient_accumulation_steps * present // size
            changes = {"per_device_train_batch_size": size, "gradient_accumulation_steps": steps}
            option = tried(changes, batch=resized(batch, size))
            if option is not None and option.fits is not False:
                return option
            smallest = option or smallest
    return smallest


def _frozen(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer | None, tried: Callable[..., Option | None]
) -> Option | None:
    fakes = Fakes()
    copied = fakes.copy(model)
    if not _freeze_half(copied):
        return None
    made = fakes.copy(optimizer) if optimizer is not None else None
    return tried({}, "the first half of the parameters frozen", model=copied, optimizer=made)


def _freeze_half(model: torch.nn.Module) -> bool:
    """Freeze the first half of the weights; return whether that freezes some and leaves some trainable."""
    weights = [*model.parameters()]
    ends = itertools.accumulate(each.numel() for each in weights)
    half = sum(each.numel() for each in weights) / 2
    first = [each for each, end in zip(weights, ends, strict=True) if end <= half]
    changes = any(each.requires_grad for each in first)
    for each in first:
        each.requires_grad_(False)
    return changes and any(each.requires_grad for each in weights)
