"""Runs the benchmarks that take a minute or less each, and writes what they print into the page Performance.

Takes about four minutes on two quiet cores.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from page import machine, replace_part

COMMANDS = (
    "loop.py",
    "evaluation.py --turns 9",
    "ddp_loop.py --turns 9 --steps 20",
    "checkpoint.py --megabytes 100 --turns 3",
    "resuming.py",
    "import_time.py",
    "accelerator.py",
    "ledger.py --seconds 5",
)


def output_of(command: str) -> str:
    """Return what a benchmark prints."""
    script, *options = command.split()
    path = str(Path(__file__).with_name(script))
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", path, *options], capture_output=True, text=True, timeout=570, env=environment
    )
    if done.returncode:
        raise RuntimeError(f"{command} failed:\n{done.stdout[-1000:]}{done.stderr[-3000:]}")
    return done.stdout.strip()


def main() -> None:
    """Runs all, one after the other, and replaces the part of the page."""
    parts = []
    for command in COMMANDS:
        parts.append(f"`python benchmarks/{command}`\n\n```text\n{output_of(command)}\n```")
        print(parts[-1], flush=True)
    replace_part("measures", "\n\n".join([f"Machine: {machine(['torch', 'trainer_kit'], 1)}", *parts]))


if __name__ == "__main__":
    main()
