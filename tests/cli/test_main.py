"""The command line: exit codes and sentences, never a traceback."""

from __future__ import annotations

import argparse
import subprocess
import sys
from typing import ClassVar

import pytest

import trainer_kit
from trainer_kit.cli import main


class Failing:
    """Fail as told."""

    EXIT_CODES: ClassVar[dict[int, str]] = {}

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        pass

    def run(self, options: argparse.Namespace) -> int:
        raise self.error


def ended(words: list[str]) -> int | str | None:
    """The code with which the command line `words` leaves the process."""
    with pytest.raises(SystemExit) as left:
        main.main(words)
    return left.value.code


def test_help_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert ended(["--help"]) == 0
    shown = capsys.readouterr().out
    for name, command in main.COMMANDS.items():
        assert name in shown
        assert (command.__doc__ or "").partition("\n")[0].split()[0] in shown


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert ended(["--version"]) == 0
    assert capsys.readouterr().out == f"trainer-kit {trainer_kit.__version__}\n"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["evn"], "there is no command 'evn'; did you mean 'env'?"),
        (["zzzzz"], "there is no command 'zzzzz'; use one of: launch, config, "),
        ([], "COMMAND"),
        (["env", "--nonsense"], "--nonsense"),
    ],
)
def test_a_command_line_that_makes_no_sense(
    words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ended(words) == 2
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code", "sentence"),
    [
        (ValueError("steps=-1 is wrong"), 1, "trainer-kit fail: steps=-1 is wrong\n"),
        (FileNotFoundError(2, "No such file", "run.yaml"), 1, "trainer-kit fail: [Errno 2] No such file: 'run.yaml'\n"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_an_error_of_a_command_is_a_sentence(
    error: BaseException,
    code: int,
    sentence: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(main.COMMANDS, "fail", Failing(error))
    assert main.main(["fail"]) == code
    assert capsys.readouterr().err == sentence


def test_an_error_of_ours_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(main.COMMANDS, "fail", Failing(AssertionError("a bug")))
    with pytest.raises(AssertionError, match="a bug"):
        main.main(["fail"])


@pytest.mark.slow
def test_a_reader_that_leaves_early_is_no_error() -> None:
    script = "import sys\nsys.stdin.read()\nfrom trainer_kit.cli.main import main\nsys.exit(main(['env']))"
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", script], stdin=pipe, stdout=pipe, stderr=pipe) as process:
        assert process.stdin
        assert process.stdout
        process.stdout.close()
        process.stdin.close()  # lets the command begin
        process.stdin = process.stdout = None
        _, errors = process.communicate(timeout=120)
    assert errors == b""
    assert process.returncode == 0


def test_help_does_not_wait_for_torch() -> None:
    script = (
        "import sys\nfrom trainer_kit.cli.main import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit:\n    print('torch' in sys.modules)"
    )
    shown = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
    assert shown.stdout.splitlines()[-1] == "False"
