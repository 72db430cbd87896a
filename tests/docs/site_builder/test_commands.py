"""The command line's page shows what the parsers take."""

from __future__ import annotations

import re
from pathlib import Path

from site_builder.commands import command_line, commands, exit_codes, options_of

from trainer_kit.cli.main import COMMANDS


def test_each_command_and_action_has_a_section() -> None:
    names = [" ".join(command.words[1:]) for command in commands()]
    assert {*COMMANDS, "checkpoints ls", "checkpoints prune"} <= {*names}
    page = command_line()
    assert [name for name in names if f"trainer-kit {name} {{ #" not in page] == []


def test_options_stand_with_their_values_and_meaning() -> None:
    page = command_line()
    assert "`--keep-best N` | number of best ones that stay too (default: 1) |" in page
    assert "`--mixed-precision {no,fp16,bf16,fp8}`" in page
    assert "--mixed_precision" not in page  # hidden spellings stay hidden
    assert str(Path.home()) not in page


def test_defaults_stand_in_the_help() -> None:
    page = command_line()
    assert "optimizer steps to compare, at least 2 (default: 20)" in page
    assert "%(" not in page


def test_options_in_sentences_are_code() -> None:
    page = command_line()
    assert "up to `--steps`, into" in page
    assert "with `--tpu` devices" in page
    assert "``" not in page.replace("```", "")


def test_aligned_lists_become_tables() -> None:
    page = command_line()
    assert "| `FOLDER` | one with a config.json, such as a checkpoint |" in page
    [meaning] = re.findall(r"^\| `MODULE:FUNCTION` \| (.*) \|$", page, re.MULTILINE)
    assert meaning.startswith("a function of yours")
    assert meaning.endswith("modules are found in the current folder")


def test_each_exit_code_has_a_meaning() -> None:
    page = exit_codes()
    for name, command in COMMANDS.items():
        assert 0 in command.EXIT_CODES
        assert page.count(f"| [`{name}`](command-line.md#{name}) |") == len(command.EXIT_CODES)


def test_the_usage_stands_on_one_line() -> None:
    usages = re.findall(r"```text\n(.*?)\n```", command_line(), re.DOTALL)
    assert len(usages) == len([*commands()])
    assert [usage for usage in usages if "\n" in usage or "  " in usage] == []


def test_options_name_their_default() -> None:
    """An option with a value is required, or its help says what happens without it."""
    without = [
        f"{command.words[1]} {option.option_strings[0]}"
        for command in commands()
        for option in options_of(command.parser)
        if option.option_strings and option.nargs != 0 and not option.required and "default" not in str(option.help)
    ]
    assert without == ["report --compare"]
