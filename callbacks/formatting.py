"""How numbers are shown to people."""

from __future__ import annotations

import datetime
from collections.abc import Collection, Mapping
from typing import Any

HIDDEN = frozenset(
    {"steps_per_second", "data_wait", "memory_gib", "reserved_memory_gib", "peak_memory_gib"}
    | {f"{compiler}/{figure}" for compiler in ("xla", "compile") for figure in ("compiles", "compile_seconds")}
)
"""What a record holds beside what fits into a line; the writers of files have it all."""

_SHORT_NAMES = {"learning_rate": "lr", "samples_per_second": "samples/s", "tokens_per_second": "tokens/s"}


def number(value: Any) -> str:
    """Four significant digits, thousands set apart: 0.4321, 5e-05, 1,234, nan."""
    if not isinstance(value, float):
        return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e9 else f"{value:.4g}"


def pairs(values: Mapping[str, Any], hidden: Collection[str] = ()) -> str:
    """All names but the step and the `hidden` ones with their numbers in one line: "loss 0.4321  lr 5e-05"."""
    names = [name for name in values if name != "step" and name not in hidden]
    return "  ".join(f"{_SHORT_NAMES.get(name, name)} {number(values[name])}" for name in names)


def metrics_line(metrics: Mapping[str, Any]) -> str:
    """An evaluation's metrics in one line, without its steps per second."""
    return pairs(metrics, {name for name in metrics if name.endswith("_steps_per_second")})


def is_summary(record: Mapping[str, Any]) -> bool:
    """Whether a record holds the figures of the whole run, as the last one does."""
    return "train_runtime" in record


def duration(seconds: float) -> str:
    """Hours, minutes and seconds: 0:01:23."""
    return str(datetime.timedelta(seconds=round(seconds)))
