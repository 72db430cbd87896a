"""Sizes, durations, numbers and lists of names as text, and sizes from text."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from typing import Any

GIB = 2**30

_SIZE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
_DURATION_UNITS = (("s", 1), ("min", 60), ("h", 3600), ("d", 86400))
_PREFIXES = (("Y", 1e24), ("Z", 1e21), ("E", 1e18), ("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3))


def parse_size(size: int | str, name: str = "max_shard_size") -> int:
    """Return a size in bytes.

    Args:
        size: A number of bytes, or a string such as "5GB" (10**9) or "200MiB" (2**20).
        name: Name of the argument, for the error.

    Raises:
        ValueError: If `size` is less than one byte or not a size.
    """
    count: float = 0
    if isinstance(size, int) and not isinstance(size, bool):
        count = size
    elif isinstance(size, str) and (match := re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMGT])(i?)B", size, re.IGNORECASE)):
        number, prefix, binary = match.groups()
        count = float(number) * (1024 if binary else 1000) ** ("KMGT".index(prefix.upper()) + 1)
    if count < 1:
        raise ValueError(f"{name}={size!r} is not known; use a number of bytes or a string such as '5GB' or '200MiB'")
    return int(count)


def format_size(nbytes: float) -> str:
    """Format a number of bytes with four significant digits: 1.385 GiB, 356 MiB, 512 B."""
    unit, name = size_unit(nbytes)
    return f"{nbytes / unit:,.4g} {name}"


def size_unit(nbytes: float) -> tuple[int, str]:
    """Return the bytes and the name of the unit for a size: (1048576, "MiB") for 3 MB."""
    power = 0
    if not math.isfinite(nbytes):
        return 1, _SIZE_UNITS[0]
    while abs(nbytes) >= 1023.5 * 1024**power and power < len(_SIZE_UNITS) - 1:  # 1023.5 would be written as 1024
        power += 1
    return 1024**power, _SIZE_UNITS[power]


def format_duration(seconds: float) -> str:
    """Format seconds in at most two units: 0.35 s, 12 s, 3 min 20 s, 4 h 5 min, 2 d 3 h."""
    if not math.isfinite(seconds):
        return format_number(seconds)
    if seconds < 0:
        return f"-{format_duration(-seconds)}"
    if seconds < 59.5:
        return f"{seconds:.2g} s" if seconds < 9.95 else f"{seconds:.0f} s"
    index = 1 if seconds < 3599.5 else 2 if seconds < 2 * 86400 - 30 else 3
    (part_name, part), (name, unit) = _DURATION_UNITS[index - 1 : index + 1]
    count, rest = divmod(round(seconds / part), unit // part)
    return f"{count:,} {name}" + (f" {rest} {part_name}" if rest else "")


def format_number(value: Any) -> str:
    """Format with four significant digits and thousands separators: 0.4321, 5e-05, 1,234; other values as text."""
    if not isinstance(value, float):
        return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e9 else f"{value:.4g}"


def format_si(value: float, unit: str = "", digits: int = 3) -> str:
    """Format with at most `digits` significant digits and an SI prefix: 1.5k, 20M, 0.25, 3e-4, 2.5 GFLOP."""
    if not math.isfinite(value):
        return f"{value}{unit and ' '}{unit}"
    value = float(f"{value:.{digits}g}")  # 999,999 is 1M, not 1000k
    prefix, factor = next((each for each in _PREFIXES if abs(value) >= each[1]), ("", 1.0))
    number = f"{value / factor:.{digits}g}"
    if 0 < abs(value) < 1e-3:
        mantissa, _, exponent = f"{value:.{digits - 1}e}".partition("e")
        number = f"{float(mantissa):g}e{int(exponent)}"
    return f"{number}{unit and ' '}{prefix}{unit}"


def format_count(number: float, noun: str) -> str:
    """Format a number with its noun: 1 step, 2,000 steps, 0.5 epochs."""
    text = format_number(number)
    return f"{text} {pluralize(noun, 1 if text == '1' else 2)}"


def pluralize(noun: str, number: float) -> str:
    """Return the noun as it follows this number: step, steps; batch, batches."""
    return noun if number == 1 else f"{noun}es" if noun.endswith(("s", "sh", "tch", "x")) else f"{noun}s"


def describe_shares(shares: Sequence[int]) -> str:
    """Format the shares of a whole, the largest first: 171, 171, 170; 128 if all are equal; else 16 or 17."""
    if len({*shares}) == 1:
        return f"{shares[0]:,}"
    return ", ".join(f"{share:,}" for share in shares) if len(shares) <= 4 else f"{min(shares):,} or {max(shares):,}"


def join_names(names: Iterable[Any], most: int | None = 4) -> str:
    """Join names for a sentence: "a", "a and b", "a, b and c"; of more than four, "a, b, c and 3 more".

    Args:
        names: The names.
        most: Number of names and of "more" that are shown at most; None: all names.
    """
    shown = [str(name) for name in names]
    if most is not None and len(shown) > most:
        shown[most - 1 :] = [f"{len(shown) - most + 1:,} more"]
    return " and ".join([", ".join(shown[:-1]), shown[-1]] if len(shown) > 1 else shown)
