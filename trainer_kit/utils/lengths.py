"""Lengths of what may have none."""

from __future__ import annotations

from typing import Any


def known_length(thing: Any) -> int | None:
    """Return the length of a dataset or sampler; None if it has none, or does not know it."""
    try:
        return len(thing)
    except (NotImplementedError, TypeError, ValueError):
        return None
