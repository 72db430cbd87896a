"""Runs the commands of pages, and keeps what they print and plot in `docs/recorded`."""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from site_builder.comparison import differences
from site_builder.includes import plot_name, recorded_file
from site_builder.sources import ROOT

FOLDERS = (ROOT / "docs" / "en" / "tutorials", ROOT / "docs" / "en" / "explanation")
_STEP = re.compile(r"^```sh\n((?:(?!```).*\n)+)```\n+::: output: (\S+)$", re.MULTILINE)
_PLOT = re.compile(r"^::: plot: (\S+) (\S+)$", re.MULTILINE)
_COMPONENT = re.compile(r"^(?!peak)(\w+) +([\d.]+ [KMG]iB) +([\d.]+ [KMG]iB) +[\d.]+ B  ", re.MULTILINE)
_SIZE = (560, 250)
_TIMEOUT = 600.0


class Step(NamedTuple):
    """Commands of a page, and the name of their recorded output."""

    name: str
    commands: str


class ProcessFailed(Exception):
    """Commands of a page ended with an exit code other than 0."""


def steps(text: str) -> list[Step]:
    """Return the commands of a page whose output it shows: a block `sh` with a line `::: output: NAME` below."""
    return [Step(found[2], found[1]) for found in _STEP.finditer(text)]


def pages() -> dict[str, Path]:
    """Return the pages that show the output of commands, by name."""
    paths = sorted(path for folder in FOLDERS for path in folder.glob("*.md"))
    return {path.stem: path for path in paths if steps(path.read_text(encoding="utf-8"))}


def run(page: str, folder: Path) -> dict[str, str]:
    """Run a page's commands in an empty folder; return outputs and plots by the name of their file.

    Raises:
        ProcessFailed: If a command ends with an exit code other than 0.
        ValueError: If the page shows a plot that the run does not have.
    """
    text = pages()[page].read_text(encoding="utf-8")
    for name in ("examples", "benchmarks"):
        (folder / name).symlink_to(ROOT / name)
    made = {f"{step.name}.txt": output_of(step, folder) for step in steps(text)}
    plots = {
        plot_name(*found.groups()): _memory(made[found[1]]) if found[1] in made else _plot(folder, *found.groups())
        for found in _PLOT.finditer(text)
    }
    return made | plots


def output_of(step: Step, folder: Path) -> str:
    """Return what the commands of a page print in a folder.

    Raises:
        ProcessFailed: If a command ends with an exit code other than 0.
    """
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
        "PYTHONPATH": str(ROOT),
        "PYTHONWARNINGS": "ignore",
        "XDG_CONFIG_HOME": str(folder),  # no settings of the user
        "COLUMNS": "100",
        "OMP_NUM_THREADS": "1",  # the number of threads changes the order of additions
    }
    done = subprocess.run(
        ["bash", "-e", "-c", step.commands],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=_TIMEOUT, check=False,
    )  # fmt: skip
    if done.returncode:
        raise ProcessFailed(f"{step.commands}exits with code {done.returncode}\n{done.stdout}{done.stderr}")
    interpreter = rf"{re.escape(str(Path(sys.executable).parent))}/python[\d.]*"  # scripts may name it python3
    return re.sub(interpreter, "python", done.stdout.replace(f"{folder}/", "")).strip("\n") + "\n"


def _plot(folder: Path, run_dirs: str, name: str) -> str:
    """Return a plot of a report as HTML in one line, with the report's colours as variables."""
    from trainer_kit.report import blocks, drawing
    from trainer_kit.report.history import RunHistory
    from trainer_kit.report.markup import element
    from trainer_kit.report.panels import panels

    histories = [RunHistory(folder / run_dir) for run_dir in run_dirs.split("+")]
    found = {panel.key: panel for panel in panels(histories)}
    if name not in found:
        raise ValueError(f"the page shows the plot {name} of {run_dirs}, which has {', '.join(found)}")
    panel = found[name]
    with drawing.settings():
        svg = drawing.curves(panel, plot_name(run_dirs, name).removesuffix(".svg"), _SIZE)
    labels = [element("span", blocks.line(each.style), each.label, class_="label") for each in panel.series]
    legend = labels if len(labels) > 1 else []
    caption = element("figcaption", element("strong", panel.title), *legend)
    return f'<figure class="plot">{caption}{svg}</figure>\n'


def _memory(output: str) -> str:
    """Return the components of a step's memory, estimated and measured, as bars: a figure in one line of HTML."""
    from trainer_kit.report import drawing
    from trainer_kit.report.colours import bar_role
    from trainer_kit.report.markup import Markup, element
    from trainer_kit.utils.units import GIB, parse_size

    rows: dict[str, dict[str, float]] = {"estimated": {}, "measured": {}}
    for name, *sizes in _COMPONENT.findall(output):
        for row, size in zip(rows.values(), sizes, strict=True):
            row[name] = parse_size(size) / GIB
    title = "The memory of a step"
    said = ". ".join(
        f"{label}: {', '.join(f'{name} {gib * 1024:.3g} MiB' for name, gib in row.items())}"
        for label, row in rows.items()
    )
    with drawing.settings():
        svg = drawing.bars(rows, "memory", f"{title}. {said}.", _SIZE)
    names = list(rows["estimated"])
    samples = {
        name: Markup(
            f'<svg class="sample" viewBox="0 0 24 8" aria-hidden="true"><path d="M1 4H23" stroke-width="8" '
            f'style="stroke:var(--{bar_role(names, name)})"/></svg>'
        )
        for name in names
    }
    legend = [element("span", sample, name, class_="label") for name, sample in samples.items()]
    return f'<figure class="plot">{element("figcaption", element("strong", title), *legend)}{svg}</figure>\n'


def changes(page: str, made: dict[str, str]) -> list[str]:
    """Return what differs between a page's recorded files and those that its commands made now."""
    folder = recorded_file(page, "")
    names = sorted({*made, *(path.name for path in folder.glob("*"))})
    found = []
    for name in names:
        path = folder / name
        if name not in made or not path.is_file():
            found.append(f"{name} is {'not recorded' if name in made else 'not made any more'}")
        else:
            found += [f"{name}: {each}" for each in differences(path.read_text(encoding="utf-8"), made[name])]
    return found


def record(page: str) -> None:
    """Run a page's commands and keep what they print and plot."""
    with tempfile.TemporaryDirectory() as folder:
        made = run(page, Path(folder))
    target = recorded_file(page, "")
    target.mkdir(parents=True, exist_ok=True)
    for path in target.iterdir():
        path.unlink()
    for name, content in made.items():
        (target / name).write_text(content, encoding="utf-8")


def main(arguments: list[str] | None = None) -> int:
    """Record pages and print the time of each; return 1 if a command failed."""
    parser = argparse.ArgumentParser(
        prog="scripts/tutorials",
        description="Runs the commands of tutorials and other pages and records their outputs in docs/recorded.",
    )
    parser.add_argument("page", nargs="*", help="names of pages (default: all)")
    chosen = parser.parse_args(arguments).page or pages()
    if unknown := [page for page in chosen if page not in pages()]:
        parser.error(f"{', '.join(unknown)} is no page with recorded outputs; use {', '.join(pages())}")
    for page in chosen:
        begin = time.monotonic()
        try:
            record(page)
        except (ProcessFailed, ValueError) as error:
            print(f"scripts/tutorials: {page}: {error}", file=sys.stderr)
            return 1
        print(f"recorded {page} in {time.monotonic() - begin:.0f} s")
    return 0
