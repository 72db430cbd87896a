"""Words that several parts of a plan are made of."""

from __future__ import annotations

from collections.abc import Sequence


def listed(names: Sequence[str], shown: int = 3) -> str:
    """A few names, and how many there are beside."""
    more = f" and {len(names) - shown:,} more" if len(names) > shown else ""
    return ", ".join(names[:shown]) + more


def said(error: Exception) -> str:
    """The kind of an error and the first line of what it says; of one in a worker that reads data, its own words."""
    lines = str(error).strip().splitlines() or [""]
    if lines[0].startswith("Caught ") and "in DataLoader worker" in lines[0]:  # then follows its traceback
        return lines[-1]
    return f"{type(error).__name__}: {lines[0]}"
