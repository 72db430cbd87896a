"""The packages that tests/ecosystem tries the library with, and their versions."""

from __future__ import annotations

import configparser
import re
from pathlib import Path

from packaging.version import Version

from site_builder.tables import table

ROOT = Path(__file__).parents[2]
NEEDED = ("torch", "transformers", "safetensors", "numpy", "tensorboard")
COMPARED = ("accelerate", "torchao", "torchmetrics", "scikit-learn")

_BOUND = re.compile(r"^([\w.-]+)(?:\[.*\])?>=([\w.]+)", re.MULTILINE)


def packages() -> str:
    """Return the table of packages with the oldest supported and the newest tried version, of setup.cfg and CI."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg", encoding="utf-8")
    oldest = lowest("\n".join([setup["options"]["install_requires"], *extras(setup)]))
    both = "\n".join(setup["options.extras_require"][name] for name in ("ecosystem", "trackers", "draccus", "ray"))
    named = dict(_BOUND.findall(both))
    newest = tried()
    names = [*NEEDED, *sorted({*COMPARED, *named}, key=str.lower)]
    return table(["package", "oldest", "newest tried"], [[f"`{name}`", oldest[name], newest[name]] for name in names])


def extras(setup: configparser.ConfigParser) -> list[str]:
    """Return the requirements of each extra, but for the benchmarks, which no test runs."""
    return [value for name, value in setup.items("options.extras_require", raw=True) if name != "bench"]


def lowest(requirements: str) -> dict[str, str]:
    """Return the bound of each package, the lowest of those that differ by Python."""
    found: dict[str, str] = {}
    for name, bound in _BOUND.findall(requirements):
        found[name] = min(found.get(name, bound), bound, key=Version)
    return found


def tried() -> dict[str, str]:
    """Return the newest version of each package in constraints.txt."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    found: dict[str, str] = {}
    for line in lines:
        if (match := re.match(r"([\w.-]+)==([\w.]+)", line)) is not None:
            found[match[1]] = max(found.get(match[1], "0"), match[2], key=Version)  # lines differ by Python
    return found
