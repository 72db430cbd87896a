"""The examples of docs/en/how-to/configuration.md run as they stand."""

from __future__ import annotations

import sys

import pytest
from kit.guides import Guide

GUIDE = Guide("docs/en/how-to/configuration.md")
EXAMPLES = list(GUIDE.python)


@pytest.mark.parametrize("number", [0, 1])
def test_examples_of_the_package_run(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", "--learning_rate", "3e-4"])
    names = run(number)
    assert names["args"].max_steps == (100 if number else -1)
    assert names["args"].learning_rate == (5e-5 if number else 3e-4)


@pytest.mark.ecosystem
@pytest.mark.parametrize(
    ("number", "package"), [(2, "transformers"), (3, "omegaconf"), (4, "jsonargparse"), (5, "draccus")]
)
def test_examples_of_other_packages_run(number: int, package: str) -> None:
    pytest.importorskip(package)
    names = run(number)
    assert names.get("rate", getattr(names.get("args"), "learning_rate", None)) == 3e-4


def test_there_are_examples() -> None:
    assert len(EXAMPLES) == 6


def run(number: int) -> dict[str, object]:
    names: dict[str, object] = {"__name__": __name__}
    exec(EXAMPLES[number], names)
    return names
