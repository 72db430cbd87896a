"""Phrases that several parts of a plan share."""

from __future__ import annotations

from collections.abc import Sequence


def listed(names: Sequence[str], shown: int = 3) -> str:
    """Join the first names, and add the number of the others."""
    more = f" and {len(names) - shown:,} more" if len(names) > shown else ""
    return ", ".join(names[:shown]) + more


def said(error: Exception) -> str:
    """Return an error's type and first line; for an error in a data worker, its own last line."""
    lines = str(error).strip().splitlines() or [""]
    if lines[0].startswith("Caught ") and "in DataLoader worker" in lines[0]:  # the traceback follows
        return lines[-1]
    return f"{type(error).__name__}: {lines[0]}"
