"""Names of a record's numbers in TensorBoard and other trackers, as in transformers: `train/loss`, `eval/loss`."""

from __future__ import annotations

import numbers
from collections.abc import Mapping
from typing import Any

_GROUPS = ("eval", "test")


def scalar_tags(values: Mapping[str, Any], group: str) -> dict[str, float]:
    """Return the numbers of a record, without its step, by tag.

    Args:
        values: The record; what is no number is left out.
        group: Prefix of names that have none of their own.
    """
    tags = {}
    for name, value in values.items():
        # The first check is far quicker.
        if name != "step" and (type(value) is float or isinstance(value, numbers.Real)):
            prefix, _, rest = name.partition("_")
            tags[f"{prefix}/{rest}" if rest and prefix in _GROUPS else f"{group}/{name}"] = float(value)
    return tags


def final_tags(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics of a whole training by tag: those of callbacks are under `run/`, separate from records."""
    own = {name: value for name, value in metrics.items() if name.startswith("train_") or name in ("step", "epoch")}
    others = {name: value for name, value in metrics.items() if name not in own}
    return scalar_tags(own, "train") | scalar_tags(others, "run")
