"""Number formats of a report."""

from __future__ import annotations

import math
from collections.abc import Iterable
from datetime import datetime
from typing import Any

_SUFFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
_SIZES = ((1024.0, "TiB", 1 / 1024), (1.0, "GiB", 1.0), (1 / 1024, "MiB", 1024.0), (0.0, "KiB", 1024.0**2))


def number(value: Any) -> str:
    """Format with four significant digits and thousands separators: 0.4321, 5e-05, 1,234; other values as text."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e9 else f"{value:.4g}"


def short(value: float, digits: int = 3) -> str:
    """Format with at most `digits` significant digits and a suffix for thousands: 1.5k, 20M, 0.25, 3e-4."""
    if 0 < abs(value) < 1e-3:
        mantissa, _, exponent = f"{value:.{digits - 1}e}".partition("e")
        return f"{float(mantissa):g}e{int(exponent)}"
    size, suffix = next(((size, suffix) for size, suffix in _SUFFIXES if abs(value) >= size), (1.0, ""))
    return f"{value / size:.{digits}g}{suffix}"


def percent(share: float) -> str:
    """Format a share of 1 in percent: 93.1 %, 0.08 %."""
    return f"{round(100 * share, 1 if share >= 0.01 else 2):g} %"


def size(gib: float) -> str:
    """Format GiB in a suitable unit: 12.3 GiB, 356 MiB."""
    factor, unit = size_unit(gib)
    amount = gib * factor
    return f"{amount:,.0f} {unit}" if abs(amount) >= 1000 else f"{amount:.3g} {unit}"


def size_unit(gib: float) -> tuple[float, str]:
    """Return a suitable unit for GiB of this magnitude: the factor and the unit's name."""
    return next(((factor, unit) for least, unit, factor in _SIZES if abs(gib) >= least), (1.0, "GiB"))


def duration(seconds: float) -> str:
    """Format seconds in at most two units: 0.35 s, 12 s, 3 min 20 s, 4 h 5 min, 2 d 3 h."""
    if not math.isfinite(seconds):
        return number(seconds)
    if seconds < 59.5:
        return f"{seconds:.2g} s" if seconds < 9.95 else f"{seconds:.0f} s"
    for unit, name, part, part_name in ((60, "min", 1, "s"), (3600, "h", 60, "min"), (86400, "d", 3600, "h")):
        parts = round(seconds / part)
        if parts * part < {60: 3600, 3600: 2 * 86400}.get(unit, math.inf):
            whole, rest = divmod(parts, unit // part)
            return f"{whole} {name}" + (f" {rest} {part_name}" if rest else "")
    raise AssertionError("days have no end")


def moment(seconds: float) -> str:
    """Format seconds since 1970 in this machine's time zone: 2026-05-01 14:03 +0200."""
    if not math.isfinite(seconds):
        return "unknown"
    return datetime.fromtimestamp(seconds).astimezone().strftime("%Y-%m-%d %H:%M %z")


def capitalized(text: str) -> str:
    """Return the text with its first letter in upper case, the others unchanged."""
    return text[:1].upper() + text[1:]


def count(number: int, noun: str) -> str:
    """Format a number with its noun: 1 step, 2,000 steps."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def listed(words: Iterable[str]) -> str:
    """Join words: a; a and b; a, b and c."""
    *most, last = words
    return f"{', '.join(most)} and {last}" if most else last
