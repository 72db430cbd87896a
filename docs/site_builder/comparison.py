"""Compares what a command printed with what it printed when it was recorded."""

from __future__ import annotations

import html
import itertools
import re

RELATIVE, ABSOLUTE = 0.05, 0.002
"""Largest difference of two numbers that count as equal: other processors round in another way."""

_UNITS = (
    r"(?:ns|us|ms|s|min|minutes?|seconds?|h|(?:samples|tokens|steps|items)(?:/s|/second)|(?:[KMGT]i?)?B(?:/s)?"
    r"|[kMGTP]?FLOP(?:/s|s)?)"
)
_MASKED = {
    "TIME": re.compile(
        rf"(?:\b\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)? ?{_UNITS}(?![\w/])(?: *\d+(?:\.\d+)?%)?"
        r"|\d{4}-\d\d-\d\d[ T]\d\d:\d\d(?::\d\d)?|(?<=Time: )[\d.]+|(?<=Samples/second: )[\d.,]+)"
    ),
    "CHECKSUM": re.compile(r"\b(?=[0-9a-f]*[a-f])(?=[0-9a-f]*\d)[0-9a-f]{8,64}\b"),
    "NEWEST": re.compile(r"(?<=newest checkpoint: step )\d+"),  # written in the background while the run is killed
}
"""What differs from run to run: times, dates, rates and sizes; checksums; what a race decides."""

_EXTREME = re.compile(r"\b((?:least|greatest|best) \S+ at step) [\d,]+")
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?")
_LABEL = re.compile(r'<svg [^>]*role="img" aria-label="([^"]*)"')


def differences(recorded: str, seen: str) -> list[str]:
    """Return a sentence for each line that differs by more than times, checksums and the rounding of numbers.

    A plot (SVG) is compared by its description, which has its first, last, least and greatest values.
    """
    pairs = itertools.zip_longest(_lines(recorded), _lines(seen))
    return [f"recorded {told!r}, now {now!r}" for told, now in pairs if not _alike(told, now)]


def _lines(text: str) -> list[str]:
    if labels := _LABEL.findall(text):
        # Where a noisy curve has its extremes depends on rounding.
        text = _EXTREME.sub(r"\1", "\n".join(map(html.unescape, labels)))
    for name, pattern in _MASKED.items():
        text = pattern.sub(name, text)
    return [re.sub(r"TIME(?: TIME)+", "TIME", " ".join(line.split())) for line in text.strip().splitlines()]


def _alike(recorded: str | None, seen: str | None) -> bool:
    if recorded is None or seen is None or _NUMBER.sub("", recorded) != _NUMBER.sub("", seen):
        return False
    numbers = ([float(number.replace(",", "")) for number in _NUMBER.findall(line)] for line in (recorded, seen))
    return all(abs(a - b) <= RELATIVE * max(abs(a), abs(b)) + ABSOLUTE for a, b in zip(*numbers, strict=True))
