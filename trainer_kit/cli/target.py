"""The script, or module, that a command runs, on its command line: options may stand before it and after it."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable


def declare_target(parser: argparse.ArgumentParser, usage: str) -> None:
    """Declare the script and the words after it.

    Args:
        parser: Parser of the command.
        usage: Usage line of the command.
    """
    parser.usage = usage
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "words", nargs=argparse.REMAINDER, metavar="script.py|module", help="script, or module with -m, to run"
    )


def read_target(
    options: argparse.Namespace, command: str, usage: str, declare: Callable[[argparse.ArgumentParser], None]
) -> argparse.Namespace:
    """Return the options with the script, the options after it, and the script's arguments: all words after `--`.

    Args:
        options: Parsed options, with all words from the script on in `words`.
        command: Name of the command, such as "verify".
        usage: Usage line of the command.
        declare: Declares the command's own options.

    Raises:
        SystemExit: With code 2 for an invalid command line.
    """
    words = options.words
    end = words.index("--") if "--" in words else len(words)
    parser = argparse.ArgumentParser(
        f"trainer-kit {command}", usage, epilog="Arguments of the script stand after --", add_help=False
    )
    declare(parser)
    parser.add_argument("script")
    parser.parse_args(words[:end], options)
    options.arguments = words[end + 1 :]
    return options


def missing_target(options: argparse.Namespace) -> str | None:
    """Return the error message if the script does not exist; None if it does."""
    if options.module or os.path.isfile(options.script):
        return None
    return f"there is no script {options.script!r}; for a module write -m before its name"


def target_words(options: argparse.Namespace) -> list[str]:
    """Return the script, or "-m" and the module, then its arguments."""
    return [*(["-m"] if options.module else []), options.script, *options.arguments]
