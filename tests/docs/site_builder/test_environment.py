"""The page of environment variables has exactly those that the sources read."""

from __future__ import annotations

from pathlib import Path

import pytest
from site_builder import environment

CONSTANTS = 'NAME = "A_NAME"\nBOTH = ("FIRST", "SECOND")\nREADERS: dict[str, int] = {"A_KEY": 1}\n'
SOURCE = """
import os
OWN = "AN_OWN"
def read():
    os.environ.get("A_GET"), os.environ["AN_ITEM"], "A_TEST" in os.environ, os.environ.get(OWN), _number("A_NUMBER")
    [os.environ.get(name) for name in ("A_LOOP", "ANOTHER_LOOP")], any(os.environ.get(each) for each in BOTH)
    for key, value in READERS.items():
        key in os.environ
    os.environ["ONLY_WRITTEN"] = os.environ.get(NAME)
    {}.get("NO_VARIABLE")
"""


def test_each_way_to_read_a_variable_is_found(tmp_path: Path) -> None:
    (tmp_path / "trainer_kit" / "config").mkdir(parents=True)
    (tmp_path / "trainer_kit" / "config" / "environment.py").write_text(CONSTANTS)
    (tmp_path / "trainer_kit" / "reader.py").write_text(SOURCE)
    assert environment.variables(tmp_path) == [
        "ANOTHER_LOOP", "AN_ITEM", "AN_OWN", "A_GET", "A_KEY", "A_LOOP", "A_NAME", "A_NUMBER", "A_TEST", "FIRST",
        "SECOND",
    ]  # fmt: skip


def test_a_variable_without_a_meaning_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "`WORLD_SIZE`" in environment.environment()
    monkeypatch.delitem(environment.MEANINGS["torchrun"], "RANK")
    with pytest.raises(ValueError, match=r"RANK: MEANINGS of site_builder/environment.py must hold exactly"):
        environment.environment()
