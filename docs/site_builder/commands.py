"""The command line: each command, its usage, its arguments and options, and its exit codes, from its own parser."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from typing import NamedTuple

from site_builder.tables import code, table
from trainer_kit.cli.main import COMMANDS, EXIT_CODES, make_parser
from trainer_kit.launch.config import default_path


class Command(NamedTuple):
    """A command or an action of one.

    Attributes:
        words: Its words, such as `("trainer-kit", "checkpoints", "ls")`.
        parser: Its parser.
        summary: One sentence.
    """

    words: tuple[str, ...]
    parser: argparse.ArgumentParser
    summary: str


def commands() -> Iterator[Command]:
    """Yield all commands, each before its actions."""
    yield from _below(("trainer-kit",), make_parser())


def _below(words: tuple[str, ...], parser: argparse.ArgumentParser) -> Iterator[Command]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            summaries = {choice.dest: choice.help or "" for choice in action._choices_actions}
            for name, inner in action.choices.items():
                yield Command((*words, name), inner, summaries.get(name, ""))
                yield from _below((*words, name), inner)


def options_of(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """Return the arguments and options of a parser that its help shows, without `--help` and actions."""
    kinds = (argparse._HelpAction, argparse._SubParsersAction)
    return [each for each in parser._actions if each.help != argparse.SUPPRESS and not isinstance(each, kinds)]


def command_line() -> str:
    """Return a section for each command."""
    return "\n\n".join(map(_section, commands()))


def _section(command: Command) -> str:
    name = " ".join(command.words)
    level = "#" * len(command.words)
    usage = _usage(command.parser)
    parts = [f"{level} {name} {{ #{anchor_of(command)} }}", f"```text\n{usage}\n```", _description(command)]
    if rows := [[_names(command, each), _help(command, each)] for each in options_of(command.parser)]:
        parts.append(table(["argument", "meaning"], rows))
    if len(command.words) == 2:
        rows = [[code(number), meaning] for number, meaning in COMMANDS[command.words[1]].EXIT_CODES.items()]
        parts.append(table(["exit code", "meaning"], rows))
    return "\n\n".join(parts)


def _usage(parser: argparse.ArgumentParser) -> str:
    """Return the usage on one line, which the page wraps: the parser's lines depend on the width of a terminal."""
    return " ".join(parser.format_usage().removeprefix("usage: ").split())


def _description(command: Command) -> str:
    """Return the description, with its aligned lists as tables."""
    text = (command.parser.description or command.summary).strip()
    parts = re.split(r"(?m)((?:^ {2}.*\n?)+)", text)
    parts[::2] = map(_with_code, parts[::2])
    parts[1::2] = map(_list, parts[1::2])
    return "".join(parts)


def _list(lines: str) -> str:
    """Return an aligned list of values and their meanings as a table; each value is indented by two spaces."""
    rows = [re.split(r"\s{2,}", entry.strip(), maxsplit=1) for entry in re.split(r"(?m)^ {2}(?=\S)", lines)[1:]]
    return table(["value", "meaning"], [[code(value), _with_code(meaning)] for value, meaning in rows]) + "\n"


def _with_code(text: str) -> str:
    """Return a text with the options that it names marked as code."""
    return re.sub(r"(?<![\w`-])--[a-z][a-z-]*", lambda option: code(option[0]), text)


def _help(command: Command, action: argparse.Action) -> str:
    """Return the help of an argument with its default, without the folder of the user who builds the site."""
    text = command.parser._get_formatter()._expand_help(action) if action.help else ""
    return _with_code(text).replace(str(default_path()), "`~/.config/trainer_kit/default_config.yaml`")


def _names(command: Command, action: argparse.Action) -> str:
    mark = f'<span id="{anchor_of(command, action)}"></span>'
    if not action.option_strings:
        return mark + code(action.metavar or action.dest)
    value = ""
    if action.nargs != 0:
        choices = f"{{{','.join(map(str, action.choices))}}}" if action.choices else action.dest.upper()
        value = f" {action.metavar or choices}"
    return mark + ", ".join(code(f"{name}{value}") for name in action.option_strings)


def anchor_of(command: Command, action: argparse.Action | None = None) -> str:
    """Return the anchor of a command, or of one of its arguments or options."""
    name = "-".join(command.words[1:])
    return name if action is None else f"{name}.{action.dest}"


def exit_codes() -> str:
    """Return the exit codes of all commands."""
    rows = [
        [f"[`{name}`](command-line.md#{name})", code(number), text]
        for name, command in COMMANDS.items()
        for number, text in command.EXIT_CODES.items()
    ]
    every = table(["exit code", "meaning"], [[code(number), text] for number, text in EXIT_CODES.items()])
    return f"## Every command\n\n{every}\n\n## Each command\n\n{table(['command', 'exit code', 'meaning'], rows)}"
