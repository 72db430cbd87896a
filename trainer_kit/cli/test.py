"""Train a tiny model as configured, and say what works here."""

from __future__ import annotations

import argparse
import sys

from trainer_kit.cli.launch import RUNNER, read_config
from trainer_kit.launch.config import default_path

EXIT_CODES = {
    0: "all is well",
    1: "something does not work",
    130: "left after Ctrl-C",
    143: "left after a signal such as SIGTERM",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the configuration to test."""
    parser.add_argument("--config", metavar="FILE", help=f"a file of `trainer-kit config` (default: {default_path()})")
    parser.add_argument("--tpu", action="store_true", default=argparse.SUPPRESS, help="test the TPU of this machine")


def run(options: argparse.Namespace) -> int:
    """Run the checks and return 0 if all pass, else 1, or 143 or 130 after a signal."""
    from trainer_kit.errors import ProcessesLeft, ProcessFailed
    from trainer_kit.launch.processes import run_processes

    words = ["-m", RUNNER, "-m", "trainer_kit.tools.self_test"]
    try:
        run_processes(read_config(options), sys.executable, words)
    except ProcessesLeft as error:
        return error.exit_code
    except ProcessFailed as error:
        last_line = error.traceback.strip().rpartition("\n")[2]  # it names the check
        check, colon, reason = last_line.removeprefix("RuntimeError: ").partition(": ")
        if colon:
            print(f"{check:12} does not work: {reason}", flush=True)
        print(f"trainer-kit test: {error}", file=sys.stderr)
        return 1
    print("all is well")
    return 0
