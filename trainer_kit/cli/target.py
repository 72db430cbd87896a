"""The script, or module, that a command runs, on its command line: options may stand before it and after it."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable


def declare_target(parser: argparse.ArgumentParser, usage: str) -> None:
    """Declares what stands after the command's own options."""
    parser.usage = usage
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("words", nargs=argparse.REMAINDER, metavar="script.py|module", help="what to run")


def read_target(
    options: argparse.Namespace, command: str, usage: str, declare: Callable[[argparse.ArgumentParser], None]
) -> argparse.Namespace:
    """With the script, the options that follow it, and what is the script's own: all after `--`.

    Args:
        options: As they were read, with all from the script on in `words`.
        command: Such as "verify".
        usage: Of the command.
        declare: Declares the command's own options.

    Raises:
        SystemExit: With code 2 for a command line that makes no sense.
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
    """What is wrong where there is no such script."""
    if options.module or os.path.isfile(options.script):
        return None
    return f"there is no script {options.script!r}; for a module write -m before its name"


def target_words(options: argparse.Namespace) -> list[str]:
    """The script, or "-m" and the module, then its arguments."""
    return [*(["-m"] if options.module else []), options.script, *options.arguments]
