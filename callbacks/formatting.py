"""Formatting of numbers for the console and the progress bar."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from trainer_kit.utils.units import format_number

HIDDEN = frozenset(
    {
        "steps_per_second", "data_wait", "goodput", "model_flops_per_second", "hardware_flops_per_second", "memory_gib",
        "reserved_memory_gib", "peak_memory_gib", "device_memory_gib", "process_memory_gib", "host_memory_gib",
        "fragmentation", "memberships", "machines_lost", "machines_joined", "regrouping_seconds", "steps_again",
        "reduced_seconds", "slowest_seconds",
    }
)  # fmt: skip
"""Names in a record that a line leaves out, in addition to `_GROUPS`; files have all of them."""

_GROUPS = ("seconds/", "anatomy/", "xla/", "compile/")

_HIDDEN_AT_THE_END = HIDDEN - {"peak_memory_gib", "goodput"}

_LEAST_MFU = 0.001
"""MFU below this is not shown: it only means that the model is small."""

_SHORT_NAMES = {"learning_rate": "lr", "samples_per_second": "samples/s", "tokens_per_second": "tokens/s"}


def pairs(record: Mapping[str, Any], hidden: Collection[str] = ()) -> str:
    """Format a record in one line, without the step, `hidden` names and groups: "loss 0.4321  lr 5e-05"."""
    shown = {name: value for name, value in record.items() if name not in hidden and not name.startswith(_GROUPS)}
    return _line(shown)


def metrics_line(metrics: Mapping[str, Any]) -> str:
    """Format an evaluation's metrics in one line, without its steps per second."""
    return _line({name: value for name, value in metrics.items() if not name.endswith("_steps_per_second")})


def _line(values: Mapping[str, Any]) -> str:
    shown = {name: value for name, value in values.items() if name != "step"}
    if shown.get("mfu", 1.0) < _LEAST_MFU:
        del shown["mfu"]
    return "  ".join(f"{_SHORT_NAMES.get(name, name)} {_text(name, value)}" for name, value in shown.items())


def _text(name: str, value: Any) -> str:
    return f"{value:.1%}" if name == "mfu" else format_number(value)


def summary_line(metrics: Mapping[str, Any]) -> str:
    """Format the main metrics of the whole run in one line."""
    return pairs(metrics, _HIDDEN_AT_THE_END)
