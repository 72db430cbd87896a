"""The command `trainer-kit verify`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from trainer_kit.cli.main import main

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="starts are forked, and killed by SIGKILL")


TASK = Path(__file__).parents[1] / "tools" / "task.py"


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def command(*words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    words = (sys.executable, "-m", "trainer_kit", "verify", *words)
    return subprocess.run(words, env=environment, capture_output=True, text=True, timeout=250, check=False)


@pytest.mark.scenario
def test_the_command_says_equal() -> None:
    done = command(str(TASK), "--steps", "4", "--seed", "1", "--", "workers")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("bitwise equal: 4 of 6 steps")
    assert done.stdout.endswith(f"trainer-kit verify --steps 4 --seed 1 {TASK} -- workers\n")
    assert "killed in step" in done.stderr


@pytest.mark.scenario
@pytest.mark.slow
@pytest.mark.usefixtures("preloaded_python")
def test_the_command_kills_one_of_two_processes() -> None:
    done = command("--num-processes", "2", "--steps", "4", "--seed", "1", str(TASK))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("bitwise equal")
    assert ", process " in done.stderr


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["nowhere.py"], "there is no script 'nowhere.py'"),
        ([str(TASK), "--steps", "1"], "--steps 1 makes no sense; give 2 or more"),
        ([str(TASK), "--short"], "unrecognized arguments: --short"),
        ([], "the following arguments are required: script"),
        ([str(TASK), "--timeout", "1", "--seed", "1"], "the straight run took longer than 1 s"),
    ],
)
def test_a_command_that_makes_no_sense(words: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = main(["verify", *words])
    except SystemExit as left:
        code = int(left.code or 0)
    assert code == 2
    assert told in capsys.readouterr().err
