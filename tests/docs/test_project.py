"""The pages of the project agree with the package, and the forms are what the hosting site reads."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

import trainer_kit
from trainer_kit.config.validation import parse_yaml

ROOT = Path(__file__).parents[2]
SECURITY = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
READS_OBJECTS = re.compile(
    r"\b(?:pickle|cloudpickle|_cloudpickle\(\)|dill|marshal|shelve|joblib)\.(?:load|loads|open)\("
    r"|\bUnpickler\b|\b(?:torch|np|numpy)\.load\(|\byaml\.(?:load|unsafe_load|full_load|Loader|UnsafeLoader)\b"
)


def text(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def read(path: str) -> Any:
    return yaml.safe_load(text(path))


def test_pickles_are_read_only_where_the_page_says() -> None:
    package = ROOT / "trainer_kit"
    sources = [path for path in package.rglob("*.py") if READS_OBJECTS.search(path.read_text(encoding="utf-8"))]
    found = {path.relative_to(package).as_posix() for path in sources}
    named = set(re.findall(r"^\| `(\S+\.py)` \|", SECURITY, re.MULTILINE))
    assert found - named == {"config/validation.py"}  # yaml.load with a subclass of the safe loader
    assert named <= found


def test_yaml_makes_no_objects() -> None:
    with pytest.raises(ValueError, match="could not determine a constructor"):
        parse_yaml("!!python/object/apply:os.getcwd []")


def test_the_citation_is_complete() -> None:
    cited = read("CITATION.cff")
    assert cited["cff-version"] == "1.2.0"
    assert cited["type"] == "software"
    assert {*cited} >= {"message", "title", "authors", "version", "license"}
    assert cited["license"] == "Apache-2.0"
    assert all(set(author) <= {"name", "website"} for author in cited["authors"])
    page = text("docs/en/project/citation.md")
    for words in (cited["title"], cited["license"], cited["version"], *(each["name"] for each in cited["authors"])):
        assert f"{{{words}}}" in page


def test_the_citation_and_the_release_notes_agree_on_what_is_released() -> None:
    cited = read("CITATION.cff")
    if "dev" not in trainer_kit.__version__:
        assert cited["version"] == trainer_kit.__version__
    head, _, notes = text("docs/en/project/release-notes.md").partition(f"\n## {cited['version']}\n")
    assert head
    assert notes
    assert ("Not released yet" in notes.partition("\n## ")[0]) == ("date-released" not in cited)


@pytest.mark.parametrize("name", ["bug_report", "feature_request"])
def test_an_issue_form_has_what_the_site_needs(name: str) -> None:
    form = read(f".github/ISSUE_TEMPLATE/{name}.yml")
    assert {"name", "description", "body"} <= {*form}
    fields = [field for field in form["body"] if field["type"] != "markdown"]
    assert {field["type"] for field in fields} <= {"textarea", "input", "dropdown", "checkboxes"}
    assert len({field["id"] for field in fields}) == len(fields)
    assert all(field["attributes"]["label"] for field in fields)


def test_the_commands_of_the_forms_are_ours() -> None:
    from trainer_kit.cli.main import main

    forms = "".join(path.read_text(encoding="utf-8") for path in (ROOT / ".github").rglob("*.yml")) + SECURITY
    commands = set(re.findall(r"`trainer-kit (\w+)", forms))
    assert {"env", "verify", "checkpoints", "replay"} <= commands
    for command in commands:
        with pytest.raises(SystemExit, match=r"^0$"):
            main([command, "--help"])
