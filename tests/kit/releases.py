"""Releases of packages that tests depend on."""

from __future__ import annotations

import importlib.metadata
import re
from functools import cache
from pathlib import Path

from packaging.requirements import Requirement


@cache
def is_pinned(package: str) -> bool:
    """Whether the installed release of a package is that of constraints.txt, which what is recorded was made with."""
    lines = (Path(__file__).parents[2] / "constraints.txt").read_text().splitlines()
    pins = [Requirement(line) for line in lines if line and not line.startswith("#")]
    return any(
        pin.name == package
        and (pin.marker is None or pin.marker.evaluate())
        and pin.specifier.contains(importlib.metadata.version(package))
        for pin in pins
    )


def without_gloo(printed: str) -> str:
    """Return what a program printed without what gloo adds to standard output in torch 2.9."""
    return re.sub(r"\[Gloo\] Rank .*\n", "", printed)
