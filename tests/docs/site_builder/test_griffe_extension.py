"""The reference shows values and functions that the source does not say."""

from __future__ import annotations

import re
from pathlib import Path

import griffe
import pytest
from site_builder.griffe_extension import RunTimeFacts

SETTINGS = """
import dataclasses

import enum
from typing import Annotated

Count = Annotated[int, "at least 1"]

def choose(): ...

class Shown: ...

class _Hidden(Shown): ...

class Kind(_Hidden, enum.Enum):
    'A kind.'

    ONE = "one"

@dataclasses.dataclass
class Settings:
    number: Count | None = None
    mode: str = dataclasses.field(default_factory=choose)
    names: list[str] = dataclasses.field(default_factory=lambda: ["a"])
    kept: dict[str, int] = dataclasses.field(default_factory=dict)
"""


def load(folder: Path) -> griffe.Module:
    """Read a package, with its settings and a function, as the site does."""
    for name, text in {
        "__init__": "",
        "settings": SETTINGS,
        "tools/__init__": "from .convert import convert\nfrom .names import NAMES",
        "tools/convert": "def convert(value: int) -> str: ...",
        "tools/names": "NAMES = tuple(sorted('ba'))",
    }.items():
        path = folder / "package" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    defaults = {
        "package.settings.Settings": {"mode": "'fast'", "names": "['a']"},
        "packages.settings.Settings": {"mode": "'of another package'"},
    }
    functions = ["package.tools.convert", "packages.tools.convert"]
    values = {"package.tools.NAMES": "('a', 'b')", "packages.tools.NAMES": "()"}
    hints = {"package.settings": {"Count": "int"}, "packages.settings": {"Count": "str"}}
    enums = {"package.settings.Kind": ["one"], "packages.settings.Kind": ["two"]}
    extensions = griffe.load_extensions("dataclasses", RunTimeFacts(defaults, functions, values, hints, enums))
    package = griffe.load("package", search_paths=[folder], extensions=extensions)
    assert isinstance(package, griffe.Module)
    return package


def test_defaults_that_functions_make_are_shown_by_value(tmp_path: Path) -> None:
    parameters = load(tmp_path)["settings.Settings"].parameters
    assert {name: str(parameters[name].default) for name in ("mode", "names", "kept")} == {
        "mode": "'fast'", "names": "['a']", "kept": "dict()",
    }  # fmt: skip


def test_a_function_is_shown_in_place_of_its_module(tmp_path: Path) -> None:
    shown = load(tmp_path)["tools.convert"]
    assert isinstance(shown, griffe.Function)
    assert (shown.path, str(shown.returns)) == ("package.tools.convert", "str")


def test_a_value_that_is_made_is_shown_as_it_is(tmp_path: Path) -> None:
    assert str(load(tmp_path)["tools.NAMES"].final_target.value) == "('a', 'b')"


def test_an_annotated_type_is_shown_as_the_type(tmp_path: Path) -> None:
    assert str(load(tmp_path)["settings.Settings"].parameters["number"].annotation) == "int | None"


def test_the_values_of_an_enumeration_are_in_its_description(tmp_path: Path) -> None:
    assert load(tmp_path)["settings.Kind"].docstring.value == "A kind.\n\nValues: `one`."


def test_a_private_base_is_not_shown(tmp_path: Path) -> None:
    assert [str(base) for base in load(tmp_path)["settings.Kind"].bases] == ["Shown", "enum.Enum"]


@pytest.mark.slow
def test_the_site_shows_them(site: Path) -> None:
    arguments = (site / "en" / "reference" / "arguments.html").read_text(encoding="utf-8")
    assert "REPORTERS" not in arguments
    callbacks = (site / "en" / "reference" / "callbacks.html").read_text(encoding="utf-8")
    assert callbacks.count("an adapter for callbacks written for") == 0  # the docstring of the module
    reference = "".join(page.read_text(encoding="utf-8") for page in (site / "en" / "reference").glob("*.html"))
    assert re.findall(r"Bases: <code>.*?>(_\w+)<", reference) == []


@pytest.mark.slow
def test_each_member_has_a_description(site: Path) -> None:
    for page in (site / "en" / "reference").glob("*.html"):
        members = page.read_text(encoding="utf-8").split('<h3 id="trainer_kit.')[1:]
        texts = {member.partition('"')[0]: re.split(r"<h[23]|<footer", member, maxsplit=1)[0] for member in members}
        assert [name for name, text in texts.items() if "<p>" not in text] == [], page.stem
