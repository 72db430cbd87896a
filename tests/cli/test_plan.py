"""`trainer-kit plan`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from trainer_kit.cli.main import main

FOLDER = Path(__file__).parent.parent.parent


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the tool is called with."""
    calls: list[Any] = []

    def plan(*words: Any, fail: Any) -> None:
        calls.append(words)

    monkeypatch.setattr("trainer_kit.cli.plan.show_plan", plan)
    return calls


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["SCRIPT"], (["SCRIPT"], None, False)),
        (["--json", "SCRIPT", "--num-processes", "4"], (["SCRIPT"], 4, True)),
        (["SCRIPT", "--", "--json", "-x"], (["SCRIPT", "--json", "-x"], None, False)),
        (["-m", "some.module", "--json", "--", "a"], (["-m", "some.module", "a"], None, True)),
    ],
)
def test_the_words(tmp_path: Path, asked: list[Any], words: list[str], expected: Any) -> None:
    script = tmp_path / "train.py"
    script.touch()
    main(["plan", *(str(script) if word == "SCRIPT" else word for word in words)])
    target, *others = expected
    assert asked == [([str(script) if word == "SCRIPT" else word for word in target], *others)]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["nowhere.py"], "there is no script 'nowhere.py'; for a module write -m before its name"),
        (["--num-processes", "0", "-m", "x"], "--num-processes 0 makes no sense; give 1 or more"),
    ],
)
def test_what_makes_no_sense(words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *words]) == 1
    assert capsys.readouterr().err == f"trainer-kit plan: {sentence}\n"


def test_no_script_at_all(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["plan"])
    assert "trainer-kit plan [options] [-m] script.py|module" in capsys.readouterr().err


@pytest.mark.scenario
def test_an_example(tmp_path: Path) -> None:
    script = [str(FOLDER / "examples" / "digits.py"), "--", "--short", "--output-dir", str(tmp_path / "run")]
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "trainer_kit", "plan", *script],
        capture_output=True, text=True, timeout=120, cwd=FOLDER, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "learning rate (AdamW, cosine)" in done.stdout
    assert "length       76 steps = 2 epochs of 38" in done.stdout
    assert not (tmp_path / "run").exists()
