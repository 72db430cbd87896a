"""How numbers are shown to people."""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Mapping
from typing import Any

_SHORT_NAMES = {"learning_rate": "lr", "samples_per_second": "samples/s", "tokens_per_second": "tokens/s"}


def number(value: Any) -> str:
    """Four significant digits, thousands set apart: 0.4321, 5e-05, 1,234, nan."""
    if not isinstance(value, float):
        return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e9 else f"{value:.4g}"


def pairs(values: Mapping[str, Any], shown: Iterable[str] | None = None) -> str:
    """The `shown` names (all but the step if None) and their numbers in one line: "loss 0.4321  lr 5e-05"."""
    names = [name for name in values if name != "step"] if shown is None else [name for name in shown if name in values]
    return "  ".join(f"{_SHORT_NAMES.get(name, name)} {number(values[name])}" for name in names)


def is_summary(record: Mapping[str, Any]) -> bool:
    """Whether a record holds the figures of the whole run, as the last one does."""
    return "train_runtime" in record


def duration(seconds: float) -> str:
    """Hours, minutes and seconds: 0:01:23."""
    return str(datetime.timedelta(seconds=round(seconds)))
