"""docs/en/explanation/performance.md names scripts that exist, and shows figures of all that its commands write."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from kit.guides import Guide

GUIDE = Guide("docs/en/explanation/performance.md")
ROOT = Path(__file__).parents[2]


def part(name: str) -> str:
    [text] = re.findall(rf"<!-- {name}: begin -->\n(.*?)<!-- {name}: end -->", GUIDE.text, re.DOTALL)
    return str(text)


def test_the_scripts_exist() -> None:
    named = set(re.findall(r"python (benchmarks/\w+\.py)", GUIDE.text))
    assert len(named) >= 12
    for path in [*named, *re.findall(r"`(tests/\S+\.py)`", GUIDE.text)]:
        assert (ROOT / path).exists(), path
    for link in re.findall(r"\]\((\w+\.\w+)", GUIDE.text):
        assert (ROOT / "docs" / "en" / "explanation" / link).exists(), link


@pytest.mark.parametrize("name", ["peers", "measures", "scaling"])
def test_each_part_has_figures_with_machine_and_versions(name: str) -> None:
    assert re.search(r"Machine: .+ cores.+ torch \d+\.\d+", part(name))


def test_what_is_slower_than_a_peer_is_said() -> None:
    text = part("peers")
    assert "**Where trainer_kit takes more than another contender**" in text
    for contender in ("plain loop", "trainer_kit", "transformers' Trainer", "accelerate", "Lightning"):
        assert text.count(f"\n| {contender} |") == 4


def test_it_is_linked() -> None:
    assert "(docs/en/explanation/performance.md)" in (ROOT / "README.md").read_text(encoding="utf-8")
