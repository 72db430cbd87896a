"""Curves of learning rate schedules by name: functions from a step to the factor of the learning rate."""

from __future__ import annotations

import math
from collections.abc import Callable
from numbers import Real
from typing import NamedTuple

import torch

Factor = Callable[[int], float]
"""Maps a step to the learning rate's factor."""

_DEFAULT_RATE = "the optimizer's default learning rate"


class Span(NamedTuple):
    """Steps of the run, steps of its warmup, and the peak learning rate, to which absolute learning rates refer."""

    total: int
    warmup: int
    peak: float


def peak_of(optimizer: torch.optim.Optimizer) -> float:
    """Return the optimizer's default learning rate; that of the first parameter group if it has none."""
    defaults = getattr(optimizer, "defaults", {})
    rate = defaults.get("lr")
    if isinstance(rate, torch.Tensor):  # shared with the groups, where a schedule changes it in place
        defaults["lr"] = rate = rate.clone()
    if not isinstance(rate, (Real, torch.Tensor)):
        group = optimizer.param_groups[0]
        rate = group.get("initial_lr", group["lr"])
    return float(rate)


def _require(holds: bool, name: str, value: float, allowed: str) -> None:
    if not holds:
        raise ValueError(f"lr_scheduler_kwargs has {name}={value!r}, which is not allowed; it must be {allowed}")


def _warmup(span: Span, step: int, start: float = 0.0) -> float:
    """Return the factor of a linear warmup from `start` to 1."""
    return start + (1 - start) * step / span.warmup


def _warmup_then(span: Span, curve: Callable[[float], float]) -> Factor:
    """Return the factor of a warmup from 0, then `curve` of p."""

    def factor(step: int) -> float:
        if step < span.warmup:
            return _warmup(span, step)
        return curve((step - span.warmup) / (span.total - span.warmup) if span.total > span.warmup else 1.0)

    return factor


def _cosine_between(start: float, end: float, progress: float) -> float:
    """Return half a cosine from `start` to `end` as `progress` goes from 0 to 1."""
    return end + (start - end) * (1 + math.cos(math.pi * progress)) / 2


def _linear(span: Span) -> Factor:
    return _warmup_then(span, lambda p: 1 - p)


def _cosine(span: Span, *, num_cycles: float = 0.5) -> Factor:
    _require(num_cycles > 0, "num_cycles", num_cycles, "above 0")
    return _warmup_then(span, lambda p: _cosine_between(1.0, 0.0, 2 * num_cycles * p))


def _cosine_with_restarts(span: Span, *, num_cycles: float = 1.0) -> Factor:
    _require(num_cycles > 0, "num_cycles", num_cycles, "above 0")
    return _warmup_then(span, lambda p: 0.0 if p >= 1 else _cosine_between(1.0, 0.0, num_cycles * p % 1.0))


def _cosine_with_min_lr(
    span: Span, *, min_lr: float | None = None, min_lr_rate: float | None = None, num_cycles: float = 0.5
) -> Factor:
    _require(num_cycles > 0, "num_cycles", num_cycles, "above 0")
    if (min_lr is None) == (min_lr_rate is None):
        raise ValueError("lr_scheduler_type='cosine_with_min_lr' needs min_lr or min_lr_rate in lr_scheduler_kwargs")
    if min_lr is not None:
        _require(0 <= min_lr <= span.peak, "min_lr", min_lr, f"from 0 to {_DEFAULT_RATE} {span.peak}")
    end = min_lr / span.peak if min_lr is not None and span.peak else min_lr_rate or 0.0
    _require(0 <= end <= 1, "min_lr_rate", end, "from 0 to 1")
    return _warmup_then(span, lambda p: _cosine_between(1.0, end, 2 * num_cycles * p))


def _inverse_sqrt(span: Span, *, timescale: float | None = None) -> Factor:
    scale = span.warmup or 10_000 if timescale is None else timescale
    _require(scale > 0, "timescale", scale, "above 0")

    def factor(step: int) -> float:
        return _warmup(span, step) if step < span.warmup else (1 + (step - span.warmup) / scale) ** -0.5

    return factor


def _constant(span: Span) -> Factor:
    return lambda step: 1.0


def _constant_with_warmup(span: Span) -> Factor:
    return _warmup_then(span, lambda p: 1.0)


def _polynomial(span: Span, *, lr_end: float = 1e-7, power: float = 1.0) -> Factor:
    _require(power > 0, "power", power, "above 0")
    _require(0 <= lr_end < span.peak, "lr_end", lr_end, f"at least 0 and below {_DEFAULT_RATE} {span.peak}")
    end = lr_end / span.peak
    return _warmup_then(span, lambda p: end + (1 - end) * (1 - p) ** power)


def _warmup_stable_decay(span: Span, *, num_decay_steps: int | None = None, min_lr_ratio: float = 0.0) -> Factor:
    longest = max(0, span.total - span.warmup)
    decay = min(longest, math.ceil(0.1 * span.total)) if num_decay_steps is None else num_decay_steps
    reason = f"the run has {span.total} steps and a warmup of {span.warmup}; lower num_decay_steps or the warmup"
    is_allowed = isinstance(decay, int) and 0 <= decay <= longest
    _require(is_allowed, "num_decay_steps", decay, f"from 0 to {longest}, whole: {reason}")
    _require(0 <= min_lr_ratio <= 1, "min_lr_ratio", min_lr_ratio, "from 0 to 1")
    begin = span.total - decay

    def factor(step: int) -> float:
        if step < span.warmup:
            return _warmup(span, step, min_lr_ratio)
        if step < begin:
            return 1.0
        return _cosine_between(1.0, min_lr_ratio, (step - begin) / decay if decay else 1.0)

    return factor


def _one_cycle(
    span: Span, *, pct_start: float = 0.3, div_factor: float = 25.0, final_div_factor: float = 1e4
) -> Factor:
    _require(0 <= pct_start <= 1, "pct_start", pct_start, "from 0 to 1")
    _require(div_factor > 0, "div_factor", div_factor, "above 0")
    _require(final_div_factor > 0, "final_div_factor", final_div_factor, "above 0")
    top, last = pct_start * span.total - 1, span.total - 1
    start, end = 1 / div_factor, 1 / (div_factor * final_div_factor)

    def factor(step: int) -> float:
        step = min(step, last)
        if step <= top:
            return _cosine_between(start, 1.0, step / top) if top else 1.0
        return _cosine_between(1.0, end, (step - top) / (last - top))

    return factor


SCHEDULES: dict[str, Callable[..., Factor]] = {
    "linear": _linear,
    "cosine": _cosine,
    "cosine_with_restarts": _cosine_with_restarts,
    "cosine_with_min_lr": _cosine_with_min_lr,
    "inverse_sqrt": _inverse_sqrt,
    "constant": _constant,
    "constant_with_warmup": _constant_with_warmup,
    "polynomial": _polynomial,
    "warmup_stable_decay": _warmup_stable_decay,
    "one_cycle": _one_cycle,
}
"""Curve of each schedule: takes a `Span` and the schedule's options as keywords."""
