"""Formats of a report: sizes in GiB, shares, moments."""

from __future__ import annotations

import math
from datetime import datetime

from trainer_kit.utils.units import GIB, format_size


def size(gib: float) -> str:
    """Format GiB in a suitable unit: 12.3 GiB, 356 MiB."""
    return format_size(gib * GIB)


def percent(share: float) -> str:
    """Format a share of 1 in percent: 93.1 %, 0.08 %."""
    return f"{round(100 * share, 1 if share >= 0.01 else 2):g} %"


def moment(seconds: float) -> str:
    """Format seconds since 1970 in this machine's time zone: 2026-05-01 14:03 +0200."""
    if not math.isfinite(seconds):
        return "unknown"
    return datetime.fromtimestamp(seconds).astimezone().strftime("%Y-%m-%d %H:%M %z")


def capitalized(text: str) -> str:
    """Return the text with its first letter in upper case, the others unchanged."""
    return text[:1].upper() + text[1:]
