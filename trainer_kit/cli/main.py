"""`trainer-kit`: reads the command line, runs one command and turns its errors into sentences."""

from __future__ import annotations

import argparse
import difflib
import os
import sys
from collections.abc import Sequence
from typing import Protocol

from trainer_kit._version import __version__
from trainer_kit.cli import checkpoints, config, env, estimate, launch, plan, replay, report, test, verify
from trainer_kit.utils.streams import escape_unknown_characters

EXIT_CODES = {0: "success", 1: "an error, in one sentence", 2: "an invalid command line", 130: "Ctrl-C"}
"""Exit codes of every command; a command may give them a meaning of its own."""


class Command(Protocol):
    """Interface of a command's module; the first line of its docstring is its help.

    Commands import torch and other slow packages inside `run`, so that `trainer-kit --help` is fast.

    Attributes:
        EXIT_CODES: Meaning of the exit codes of `run`.
    """

    __doc__: str | None
    EXIT_CODES: dict[int, str]

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the command's arguments."""

    def run(self, options: argparse.Namespace) -> int:
        """Run the command and return the exit code."""


COMMANDS: dict[str, Command] = {
    "launch": launch,
    "config": config,
    "estimate": estimate,
    "plan": plan,
    "report": report,
    "checkpoints": checkpoints,
    "verify": verify,
    "replay": replay,
    "test": test,
    "env": env,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: The words after `trainer-kit`; None for those of this process.

    Returns:
        The exit code: 0 for success, 1 for an error of the command, 130 after Ctrl-C.

    Raises:
        SystemExit: With code 2 for an invalid command line, with 0 for `--help` and `--version`.
    """
    escape_unknown_characters()
    words = list(sys.argv[1:] if arguments is None else arguments)
    parser = make_parser()
    if words and not words[0].startswith("-") and words[0] not in COMMANDS:
        parser.error(_unknown(words[0]))
    options = parser.parse_args(words)
    try:
        code = COMMANDS[options.command].run(options)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader has closed the pipe (`| head`). Python flushes again at exit, which must not fail.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ImportError, OSError, RuntimeError, TypeError, ValueError) as error:
        print(f"trainer-kit {options.command}: {error}", file=sys.stderr)
        return 1


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    parser = argparse.ArgumentParser(prog="trainer-kit", description="Helps around the training of PyTorch models.")
    parser.add_argument("--version", action="version", version=f"trainer-kit {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, title="commands")
    for name, command in COMMANDS.items():
        summary = (command.__doc__ or "").partition("\n")[0]
        codes = "; ".join(f"{code} {meaning}" for code, meaning in command.EXIT_CODES.items())
        command.add_arguments(
            commands.add_parser(name, help=summary, description=summary, epilog=f"Exit codes: {codes}.")
        )
    return parser


def _unknown(word: str) -> str:
    close = difflib.get_close_matches(word, COMMANDS, n=1)
    hint = f"did you mean {close[0]!r}?" if close else f"use one of: {', '.join(COMMANDS)}"
    return f"there is no command {word!r}; {hint}"
