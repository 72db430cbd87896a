"""Run the step at which a run broke off once more, and find where it goes wrong.

The process ends where the script calls train(): nothing that follows it runs, no `finally` either.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

EXIT_CODES = {0: "the error of the run occurred again", 1: "it did not"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the folder, the script and its arguments."""
    parser.usage = "trainer-kit replay [-h] crash-STEP [-m] script.py|module [arguments of the script]"
    parser.allow_abbrev = False
    parser.add_argument("folder", type=Path, metavar="crash-STEP", help="folder that the run left in its output_dir")
    parser.add_argument("-m", "--module", action="store_true", help="the script is the name of a module")
    parser.add_argument("script", help="the script that trained, run up to its Trainer.train")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments of the script, as they were")


def run(options: argparse.Namespace) -> int:
    """Run the step on the CPU and exit with code 0 if the run's error is reproduced, else 1."""
    from trainer_kit.tools.replay import replay

    words = [*(["-m"] if options.module else []), options.script, *options.arguments]
    replay(
        options.folder,
        words,
        say=lambda line: print(line, flush=True),
        fail=lambda why: print(f"trainer-kit replay: {why}", file=sys.stderr),
    )
