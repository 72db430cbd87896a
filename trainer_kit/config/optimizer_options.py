"""`optim_args`: options of the optimizers by name."""

from __future__ import annotations

import math
from typing import Any

_OPTIONS: dict[str, tuple[str, dict[str, type]]] = {
    "sgd": ("SGD", {"momentum": float, "dampening": float, "nesterov": bool}),
    "schedule_free_adamw": ("AdamWScheduleFree", {"r": float, "weight_lr_power": float}),
    "schedule_free_sgd": ("SGDScheduleFree", {"momentum": float, "r": float, "weight_lr_power": float}),
    "muon": ("Muon", {"momentum": float, "nesterov": bool, "ns_steps": int}),
}
"""Name of each optimizer that has options, and their types."""

_MOST_STEPS = 99
"""Newton-Schulz iterations that `torch.optim.Muon` allows."""


def parse_options(text: str) -> dict[str, float | bool] | None:
    """Parse `optim_args`, such as "momentum=0.9,nesterov=true"; return None if it is malformed."""
    options: dict[str, float | bool] = {}
    for part in text.replace(" ", "").split(","):
        name, _, value = part.partition("=")
        if not name or name in options:
            return None
        if value.lower() in ("true", "false"):
            options[name] = value.lower() == "true"
            continue
        try:
            options[name] = float(value)
        except ValueError:
            return None
    return options


def optimizer_options(optim: str, optim_args: str | None) -> dict[str, Any]:
    """Return the options of an optimizer by name.

    Args:
        optim: Name of the optimizer.
        optim_args: Its options as text that `parse_options` takes; None for none.

    Raises:
        ValueError: If the optimizer has no such option, or a value is not allowed.
    """
    if optim_args is None:
        return {}
    given = f"optim_args={optim_args!r}"
    if optim not in _OPTIONS:
        raise ValueError(
            f"{given} has no effect with optim={optim!r}; set optim to one of {', '.join(map(repr, _OPTIONS))}, or "
            "give optimizer="
        )
    title, kinds = _OPTIONS[optim]
    options: dict[str, Any] = parse_options(optim_args) or {}
    unknown = sorted(options.keys() - kinds.keys())
    if unknown:
        raise ValueError(f"{given} has {', '.join(unknown)}; {title} takes {', '.join(kinds)}, see also weight_decay")
    for name, value in options.items():
        options[name] = _checked(given, name, value, kinds[name])
    if options.get("nesterov") and optim == "sgd" and (not options.get("momentum") or options.get("dampening")):
        raise ValueError(f"{given} has nesterov without momentum, or with dampening; set momentum above 0 alone")
    return options


def check_schedule(schedule: str, optim: str, eval_strategy: str) -> None:
    """Check that a schedule fits the optimizer and the evaluations, all given by name.

    Raises:
        ValueError: If the schedule needs evaluations and there are none, or the optimizer needs no schedule.
    """
    if schedule == "reduce_lr_on_plateau" and eval_strategy == "no":
        raise ValueError(
            "lr_scheduler_type='reduce_lr_on_plateau' steps at evaluations; set eval_strategy to 'steps' or 'epoch'"
        )
    if optim.startswith("schedule_free") and not schedule.startswith("constant"):
        raise ValueError(
            f"optim={optim!r} needs no schedule; set lr_scheduler_type='constant', or with its warmup "
            "'constant_with_warmup'"
        )


def _checked(given: str, name: str, value: float | bool, kind: type) -> Any:
    if kind is bool:
        holds, allowed = isinstance(value, bool), "true or false"
    elif kind is int:
        holds, allowed = value in range(1, _MOST_STEPS + 1), f"a whole number from 1 to {_MOST_STEPS}"
    else:
        holds, allowed = 0 <= value < math.inf, "a number from 0"
    if not holds or isinstance(value, bool) != (kind is bool):
        raise ValueError(f"{given} has {name}={value}; give {allowed}")
    return kind(value)
