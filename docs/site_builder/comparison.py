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
    "SAMPLE": re.compile(
        r"(?s:(?<=sampled text\n------------\n).*?(?=\n------------\n))|(?<=continues 'A class definition':\n).+"
    ),
    "BEST": re.compile(r"(?<=best is checkpoint-)\d+|(?<=checkpoint-)\d+(?=[^\n]*, the best\b)"),
    "NEWEST": re.compile(r"(?<=newest checkpoint: step )\d+"),  # written in the background while the run is killed
}
"""What differs from run to run: times, dates, rates and sizes; checksums; text sampled from a model, in which rounding
can change a token and all after it, or decide between two evaluations; what a race decides."""

_ACTIVITY = re.compile(r"^[\w/]+ +[\d.]+ s +[\d.]+%$\n?", re.MULTILINE)
"""A row of the time by activity; which are long enough to be shown, and their order, differs."""

_BUILD = re.compile(r"(?<=torch )(\d[\d.]*)\+\w+")
_EXTREME = re.compile(r"\b((?:least|greatest|best) \S+ at step) [\d,]+")
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?")
_LABEL = re.compile(r'<svg [^>]*role="img" aria-label="([^"]*)"')


def differences(recorded: str, seen: str) -> list[str]:
    """Return a sentence for the first words that differ by more than times, checksums and the rounding of numbers.

    Line breaks do not count. A plot (SVG) is compared by its description, which has its first, last, least and greatest
    values.
    """
    told, now = _words(recorded), _words(seen)
    for index, (word, other) in enumerate(itertools.zip_longest(told, now)):
        if not _alike(word, other):
            nearby = slice(max(0, index - 4), index + 4)
            return [f"recorded {' '.join(told[nearby])!r}, now {' '.join(now[nearby])!r}"]
    return []


def _words(text: str) -> list[str]:
    if labels := _LABEL.findall(text):
        # Where a noisy curve has its extremes depends on rounding.
        text = _EXTREME.sub(r"\1", "\n".join(map(html.unescape, labels)))
    text = _BUILD.sub(r"\1", _ACTIVITY.sub("", text))
    for name, pattern in _MASKED.items():
        text = pattern.sub(name, text)
    return re.sub(r"TIME(?:,?\s+TIME)+", "TIME", text).split()  # "9.1 s" is one time, and so is "1 min 5 s"


def _alike(recorded: str | None, seen: str | None) -> bool:
    if recorded is None or seen is None or _NUMBER.sub("", recorded) != _NUMBER.sub("", seen):
        return False
    told, now = ([float(number.replace(",", "")) for number in _NUMBER.findall(word)] for word in (recorded, seen))
    return len(told) == len(now) and all(
        abs(a - b) <= RELATIVE * max(abs(a), abs(b)) + ABSOLUTE for a, b in zip(told, now, strict=True)
    )
