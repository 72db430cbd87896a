"""`trainer-kit replay` takes a folder, a script and the script's own arguments."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

import pytest

from trainer_kit.cli.main import main


@pytest.mark.parametrize(
    ("words", "script"),
    [
        (["train.py", "--lr", "1", "-m", "x"], ["train.py", "--lr", "1", "-m", "x"]),
        (["-m", "train", "--help"], ["-m", "train", "--help"]),
    ],
)
@pytest.mark.parametrize("reproduced", [True, False])
def test_the_script_gets_its_own_arguments(
    words: list[str],
    script: list[str],
    reproduced: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def replay(folder: Path, words: Sequence[str], say: Callable[[str], None], fail: object) -> NoReturn:
        assert (folder, words) == (Path("run/crash-7"), script)
        say("what was found")
        sys.exit(0 if reproduced else 1)

    monkeypatch.setattr("trainer_kit.tools.replay.replay", replay)
    with pytest.raises(SystemExit) as left:
        main(["replay", "run/crash-7", *words])
    assert left.value.code == (0 if reproduced else 1)
    assert capsys.readouterr().out == "what was found\n"


def test_a_folder_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", "nowhere/crash-7", "train.py"]) == 1
    assert capsys.readouterr().err == "trainer-kit replay: nowhere/crash-7 does not exist\n"
