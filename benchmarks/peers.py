"""The same trainings under a plain loop, trainer_kit, transformers, accelerate and Lightning, side by side.

A small MLP, BERT and GPT-2, each trained by each contender in a process of its own, in rounds, so that a busy moment
of the machine meets all: the fused AdamW, a linear schedule, clipping to 1.0, the same samples in the same order, one
thread, nothing logged, one checkpoint; then the checkpoint is resumed from in a second process. Figures are ratios to
the plain loop of the same round, medians over the rounds with quartiles. The losses of all contenders must agree.

`python benchmarks/peers.py` writes a table and a plot into the page Performance; it takes less than ten minutes on two
quiet cores. Needs the extra "bench"; a contender that is not installed is left out.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from page import PAGE, Spread, machine, replace_part, spread, table
from peers_plot import picture

TASKS, QUICK_TASKS = ("MLP", "BERT", "GPT-2"), ("MLP", "GPT-2")
CONTENDERS = ("plain", "trainer_kit", "transformers", "accelerate", "lightning")
NAMES = {"plain": "plain loop", "transformers": "transformers' Trainer", "lightning": "Lightning"}
TOLERANCE = 1e-3
"""Largest relative difference of the losses of two contenders, which sum in different orders."""
NOTABLE = 1.02
"""Ratio from which something is called slower."""


class Measure(NamedTuple):
    """A column of the table.

    Attributes:
        key: Its name in the results.
        title: Head of the column.
        scale: Factor to its unit.
        unit: Unit of the plain loop's figure.
    """

    key: str
    title: str
    scale: float
    unit: str


MEASURES = (
    Measure("step", "a step", 1e3, "ms"),
    Measure("start", "process start to first step", 1, "s"),
    Measure("memory", "peak memory", 1e-6, "MB"),
    Measure("device_memory", "peak GPU memory", 1e-6, "MB"),
    Measure("stall", "save, until training continues", 1e3, "ms"),
    Measure("stored", "save, until it is on the disk", 1e3, "ms"),
    Measure("resume", "process start to first resumed step", 1, "s"),
)
Results = dict[str, dict[str, list[dict[str, Any]]]]
"""The figures of each round, by task and contender."""


def child(contender: str, task: str, folder: Path, *flags: str) -> dict[str, Any]:
    """Run one training in a process of its own and return its figures."""
    script = str(Path(__file__).with_name("peers_contenders.py"))
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # bytecode is kept wherever a package is installed
    command = [sys.executable, "-W", "ignore", script, contender, task, str(folder), *flags, "--began"]
    done = subprocess.run([*command, repr(time.time())], env=environment, capture_output=True, text=True, timeout=280)
    if done.returncode:
        raise RuntimeError(f"{contender} failed at {task}:\n{done.stderr[-3000:]}")
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return figures


def measure(contender: str, task: str, quick: Sequence[str], threads: int) -> dict[str, Any]:
    """Return the figures of one fresh and one resumed training."""
    flags = [*quick, "--threads", str(threads)]
    with tempfile.TemporaryDirectory() as folder:
        figures = child(contender, task, Path(folder), *flags)
        resumed = child(contender, task, Path(folder), *flags, "--resume")
    after = figures["losses"][-len(resumed["losses"]) :]
    return figures | {"resume": resumed["resume"], "is_exact": difference(after, resumed["losses"]) <= TOLERANCE}


def difference(losses: Sequence[float], others: Sequence[float]) -> float:
    """Return the largest relative difference of two courses of losses; infinite if one is longer or not finite."""
    if len(losses) != len(others) or not all(map(math.isfinite, [*losses, *others])):
        return math.inf
    return max(abs(one - other) / abs(one) for one, other in zip(losses, others, strict=True))


def check_losses(results: Results) -> float:
    """Return the largest relative difference of a contender's losses from the plain loop's.

    Raises:
        ValueError: If it exceeds the tolerance: then the trainings are not the same.
    """
    largest = 0.0
    for task, contenders in results.items():
        expected = contenders["plain"][0]["losses"]
        for contender, rounds in contenders.items():
            found = max(difference(expected, each["losses"]) for each in rounds)
            if not found <= TOLERANCE:
                raise ValueError(f"{contender} computes other losses of {task} than the plain loop, by {found:.2g}")
            largest = max(largest, found)
    return largest


def ratios(results: Results, task: str, contender: str, key: str) -> Spread:
    """Return a figure as a ratio to the plain loop's of the same round; a save of less than a millisecond takes one."""
    pairs = zip(results[task][contender], results[task]["plain"], strict=True)
    least = 1e-3 if key in ("stall", "stored") else 1e-9
    return spread([max(ours[key], least) / max(plain[key], least) for ours, plain in pairs])


def measures_of(results: Results) -> list[Measure]:
    """Return the measures; that of the GPU only where there is one."""
    has_gpu = any(each["device_memory"] for task in results.values() for rounds in task.values() for each in rounds)
    return [each for each in MEASURES if has_gpu or each.key != "device_memory"]


def tables(results: Results, calls: dict[str, float]) -> str:
    """Return a table for each task; the plain loop has absolute figures, the others ratios to it."""
    parts = []
    for task, contenders in results.items():
        measures = measures_of(results)
        rows = []
        for contender, rounds in contenders.items():
            cells = [NAMES.get(contender, contender)]
            for each in measures:
                if contender == "plain":
                    median = spread([one[each.key] * each.scale for one in rounds]).median
                    cells.append(f"{median:.3g} {each.unit}" if median < 100 else f"{median:.0f} {each.unit}")
                else:
                    cells.append(ratios(results, task, contender, each.key).text())
            cells.append("yes" if all(one["is_exact"] for one in rounds) else "no")
            rows.append(cells)
        head = [task, *(each.title for each in measures), "same losses after the resume"]
        parts.append(table(head, rows))
    if calls:
        rows = [
            [NAMES.get(name, name), f"{count:.0f}", f"{count / calls['plain']:.2f}"] for name, count in calls.items()
        ]
        parts.append(table(["MLP", "calls of Python functions in a step", "ratio"], rows))
    return "\n\n".join(parts)


def slower(results: Results) -> list[str]:
    """Return a line for each figure of trainer_kit that is larger than that of another contender."""
    lines = []
    for task, contenders in results.items():
        for each in measures_of(results):
            ours = ratios(results, task, "trainer_kit", each.key)
            better = []
            for contender in contenders:
                theirs = ratios(results, task, contender, each.key)
                if contender != "trainer_kit" and ours.median > NOTABLE * theirs.median:
                    noise = ", within the noise" if ours.low <= theirs.high else ""
                    better.append(f"{NAMES.get(contender, contender)} ({theirs.median:.2f}{noise})")
            if better:
                lines.append(f"- {task}, {each.title}: {ours.median:.2f}, more than {', '.join(better)}.")
    return lines


def draw(results: Results, path: Path) -> None:
    """Draw the ratios to the plain loop, a panel for each measure but the GPU's memory."""
    contenders = [name for name in next(iter(results.values())) if name != "plain"]
    found = {
        each.title: {task: {name: ratios(results, task, name, each.key) for name in contenders} for task in results}
        for each in measures_of(results)
        if each.key != "device_memory"
    }
    path.write_text(picture(found, [NAMES.get(name, name) for name in contenders]), encoding="utf-8")


def section(results: Results, calls: dict[str, float], largest: float, rounds: int, threads: int) -> str:
    """Return the text of the marked part of the page."""
    packages = ["torch", "trainer_kit", "transformers", "accelerate", "lightning"]
    worse = slower(results)
    return "\n\n".join(
        [
            f"![Ratios to a plain loop](peers.svg)\n\n"
            f"{'One round.' if rounds == 1 else f'Medians of {rounds} rounds, quartiles in brackets.'} "
            f"Machine: {machine(packages, threads)} The losses of all contenders differ by {largest:.1e} at most.",
            tables(results, calls),
            "**Where trainer_kit takes more than another contender** (ratios to the plain loop):\n\n"
            + ("\n".join(worse) if worse else "Nowhere."),
        ]
    )


def installed(names: Iterable[str]) -> list[str]:
    """Return the contenders that can be imported; the plain loop always is."""
    return [name for name in names if name == "plain" or importlib.util.find_spec(name) is not None]


def main() -> None:
    """Runs the rounds, prints the tables, and writes them to the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--threads", type=int, default=1, help="of each process (default: %(default)s)")
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=CONTENDERS)
    parser.add_argument("--quick", action="store_true", help="one short round that checks the losses; writes no page")
    parser.add_argument("--json", type=Path, help="write all figures of all rounds to this file")
    options = parser.parse_args()
    names = installed(dict.fromkeys(["plain", "trainer_kit", *options.contenders]))
    quick, rounds = (["--quick"], 1) if options.quick else ([], options.rounds)
    results: Results = {task: {name: [] for name in names} for task in (QUICK_TASKS if options.quick else TASKS)}
    with tempfile.TemporaryDirectory() as folder:
        calls = {name: child(name, "MLP", Path(folder) / name, *quick, "--calls")["calls"] for name in names}
    text = ""
    for number in range(rounds):
        for task, contenders in results.items():
            for name in names[number % len(names) :] + names[: number % len(names)]:  # each comes first in turn
                contenders[name].append(measure(name, task, quick, options.threads))
                print(f"round {number + 1}/{rounds}: {task}, {name}", file=sys.stderr)
        if options.json:
            options.json.write_text(json.dumps({"rounds": results, "calls": calls}))
        text = section(results, calls, check_losses(results), number + 1, options.threads)
        if not options.quick:  # after each round, so that one that is interrupted leaves those before
            draw(results, PAGE.with_name("peers.svg"))
            replace_part("peers", text)
    print(text)


if __name__ == "__main__":
    main()
