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


def pairs(values: Mapping[str, Any]) -> str:
    """Names and numbers in one line: "loss 0.4321  lr 5e-05"."""
    return "  ".join(f"{_SHORT_NAMES.get(name, name)} {number(value)}" for name, value in values.items())


def summary(record: Mapping[str, Any], shown: Iterable[str]) -> str:
    """The `shown` numbers of a record in one line; all of one that tells of no single step (a run's figures)."""
    return pairs({name: record[name] for name in shown if name in record} if "loss" in record else record)


def duration(seconds: float) -> str:
    """Hours, minutes and seconds: 0:01:23."""
    return str(datetime.timedelta(seconds=round(seconds)))
