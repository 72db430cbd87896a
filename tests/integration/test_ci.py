"""No test falls between the default, which the README names, and the rest that only CI runs."""

from __future__ import annotations

import configparser
import shlex
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def default(parser: configparser.ConfigParser) -> str:
    words = shlex.split(parser["tool:pytest"]["addopts"])
    return words[words.index("-m") + 1]


def test_ci_runs_the_default_and_then_all_that_it_leaves_out() -> None:
    parser = configparser.ConfigParser(interpolation=None)
    parser.read(ROOT / "setup.cfg")
    lines = (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()
    first, *_, last = [line for line in lines if "-m pytest" in line]
    assert first == "python -m pytest"
    assert last == lines[-1] == f'python -m pytest -n $(($(nproc) + 1)) -m "not ({default(parser)})"'


@pytest.mark.parametrize("path", sorted((ROOT / "tests" / "xla").glob("test_*.py")), ids=lambda path: path.stem)
def test_xla_is_marked(path: Path) -> None:
    """CI runs what is marked in an environment that has torch_xla; no other one collects it."""
    assert "\npytestmark = pytest.mark.xla\n" in path.read_text(encoding="utf-8")
