"""The script on a command line, with options before and after it."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from trainer_kit.cli.target import declare_target, missing_target, read_target, target_words

USAGE = "trainer-kit try [options] script.py|module"


def declare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("-m", "--module", action="store_true")


def read(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    declare(parser)
    declare_target(parser, USAGE)
    return read_target(parser.parse_args(words), "try", USAGE, declare)


@pytest.mark.parametrize(
    ("words", "steps", "target"),
    [
        (["train.py"], 3, ["train.py"]),
        (["--steps", "5", "train.py"], 5, ["train.py"]),
        (["train.py", "--steps", "5"], 5, ["train.py"]),
        (["train.py", "--", "--steps", "5"], 3, ["train.py", "--steps", "5"]),
        (["train.py", "--steps", "4", "--", "--", "a b"], 4, ["train.py", "--", "a b"]),
        (["-m", "package.train", "--", "x"], 3, ["-m", "package.train", "x"]),
        (["package.train", "-m"], 3, ["-m", "package.train"]),
    ],
)
def test_options_stand_on_both_sides_and_the_rest_is_the_scripts(
    words: list[str], steps: int, target: list[str]
) -> None:
    options = read(*words)
    assert options.steps == steps
    assert target_words(options) == target


@pytest.mark.parametrize("words", [[], ["train.py", "--unknown"], ["train.py", "another.py"], ["--", "train.py"]])
def test_an_invalid_line_leaves_with_2(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        read(*words)
    assert left.value.code == 2
    assert USAGE in capsys.readouterr().err


def test_a_script_must_be_there_and_a_module_need_not(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    assert (
        missing_target(read(str(script)))
        == f"there is no script {str(script)!r}; for a module write -m before its name"
    )
    script.touch()
    assert missing_target(read(str(script))) is None
    assert missing_target(read("-m", "nowhere")) is None
