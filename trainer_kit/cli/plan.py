"""Show what a training would do before it begins: its steps, memory and disk, and its warnings.

The script, unmodified, runs up to its first Trainer.train, which then trains nothing and writes no file. The code that
would train works out the effective batch, the steps, a small drawing of the learning rate, and when it logs, evaluates
and saves. It compares the checkpoints with the free disk and the memory of a step with the device, and names the work,
the least time that it takes, and the hardware with the reason for it.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from trainer_kit.cli.target import declare_target, missing_target, read_target, target_words

if TYPE_CHECKING:
    from trainer_kit.tools.script_runner import Train
    from trainer_kit.trainer import Trainer

_USAGE = "trainer-kit plan [options] [-m] script.py|module [options] [-- arguments of the script]"

EXIT_CODES = {0: "planned", 1: "train() would fail, or the script fails or never trains"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options, the script and its arguments."""
    parser.description = __doc__
    _add_options(parser)
    declare_target(parser, _USAGE)


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--num-processes", type=int, metavar="P", help="processes to plan for (default: those of this start)"
    )
    parser.add_argument("--json", action="store_true", help="print the plan as JSON")
    parser.add_argument("-m", "--module", action="store_true", help="the script is the name of a module")


def run(options: argparse.Namespace) -> int:
    """Show the plan and exit with code 0, or 1 if the training would fail."""
    options = read_target(options, "plan", _USAGE, _add_options)
    if (missing := missing_target(options)) is not None:
        raise ValueError(missing)
    if options.num_processes is not None and options.num_processes < 1:
        raise ValueError(f"--num-processes {options.num_processes} makes no sense; give 1 or more")
    show_plan(
        target_words(options),
        options.num_processes,
        options.json,
        fail=lambda why: print(f"trainer-kit plan: {why}", file=sys.stderr, flush=True),
    )


def show_plan(words: Sequence[str], processes: int | None, as_json: bool, fail: Callable[[str], None]) -> NoReturn:
    """Print the plan of the script's first training to stdout, and end the process.

    The exit code is 0, or 1 if `train()` would fail.

    Args:
        words: The script, or "-m" and a module, then its arguments.
        processes: Number of processes to plan for; None for the real one.
        as_json: Whether to print JSON; the script's own output then goes to stderr.
        fail: Shows the reason if there is no plan.

    Raises:
        ValueError: If the script fails before it trains, or never trains.
    """
    from trainer_kit.tools.script_runner import run_until_training

    out = sys.stdout

    def take_over(trainer: Trainer, train: Train, resume_from_checkpoint: bool | str | Path | None) -> int:
        try:
            found = trainer.plan(resume_from_checkpoint, processes)
        except (OSError, TypeError, ValueError) as error:
            fail(str(error))
            return 1
        if isinstance(out, io.TextIOWrapper):
            out.reconfigure(errors="replace")  # some terminals lack the drawing's characters
        with contextlib.suppress(BrokenPipeError):  # the reader has closed the pipe (`| head`)
            print(json.dumps(found.to_dict(), indent=2) if as_json else found, file=out, flush=True)
        return 1 if found.problems else 0

    with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
        run_until_training(words, take_over)
