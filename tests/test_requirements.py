"""What a user is told to install."""

from __future__ import annotations

import configparser
from pathlib import Path

ROOT = Path(__file__).parents[1]


def extras() -> dict[str, list[str]]:
    parser = configparser.ConfigParser()  # resolves %(name)s as setuptools does
    parser.read(ROOT / "setup.cfg")
    return {name: parser["options.extras_require"][name].split() for name in parser["options.extras_require"]}


def test_no_sentence_names_an_extra_of_a_package_that_no_index_has() -> None:
    sources = [*(ROOT / "trainer_kit").rglob("*.py"), *(ROOT / "callbacks").glob("*.py"), *ROOT.glob("*.md"),
               *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").iterdir()]  # fmt: skip
    found = [path for path in sources if path.is_file() and "install 'trainer_kit[" in path.read_text(encoding="utf-8")]
    assert not found


def test_the_examples_come_with_what_their_reports_need() -> None:
    found = extras()
    assert {*found["report"]} < {*found["examples"]} < {*found["test"]}
    assert any(each.startswith("matplotlib") for each in found["examples"])
