"""What the benchmarks that write to the page Performance share: its marked parts, medians, and the machine."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import resource
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

BUSY = (
    " Other programs took most of the processor in this run: its times, and ratios of them, say little; counts of "
    "calls and memory hold."
)
PAGE = Path(__file__).parents[1] / "docs" / "en" / "explanation" / "performance.md"


class Spread(NamedTuple):
    """A median and the quartiles around it."""

    median: float
    low: float
    high: float

    def text(self, digits: int = 2) -> str:
        """Return the median, and the quartiles in brackets if they differ from it."""
        median, low, high = (f"{value:.{digits}f}" for value in self)
        return median if low == high else f"{median} ({low} to {high})"


def spread(values: Sequence[float]) -> Spread:
    """Return the median and the quartiles of at least one value."""
    if len(values) == 1:
        return Spread(values[0], values[0], values[0])
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return Spread(median, low, high)


def peak_memory() -> int:
    """Return the largest resident memory of this process so far, in bytes."""
    status = Path("/proc/self/status")
    if status.exists():  # what getrusage says includes the process that started this one
        found = re.search(r"^VmHWM:\s*(\d+) kB$", status.read_text(encoding="utf-8"), re.MULTILINE)
        assert found is not None
        return int(found[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def replace_part(name: str, text: str, page: Path = PAGE) -> None:
    """Replace what stands between `<!-- NAME: begin -->` and `<!-- NAME: end -->`.

    Raises:
        ValueError: If the page has no such part.
    """
    before = page.read_text(encoding="utf-8")
    marked = re.compile(rf"(<!-- {name}: begin -->\n).*?(<!-- {name}: end -->)", re.DOTALL)
    if len(marked.findall(before)) != 1:
        raise ValueError(f"{page} has no part marked <!-- {name}: begin --> to <!-- {name}: end -->; mark one")
    page.write_text(marked.sub(lambda found: f"{found[1]}\n{text.strip()}\n\n{found[2]}", before), encoding="utf-8")


def machine(packages: Sequence[str], threads: int) -> str:
    """Return a sentence with the processor, how busy it is, and the versions of what is measured."""
    versions = [f"Python {platform.python_version()}"]
    for package in packages:
        try:
            versions.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    cores, load = os.cpu_count() or 1, os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    return (
        f"{_processor()}, {cores} cores, {threads} {'thread' if threads == 1 else 'threads'} in each process, load "
        f"average {load:.1f} at the end; {', '.join(versions)}.{BUSY if load > 2 * cores else ''}"
    )


def _processor() -> str:
    try:
        found = re.search(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:
        found = None
    return found[1] if found else platform.processor() or platform.machine()
