"""The check of the built site finds links that lead nowhere, and what would be fetched from the network."""

from __future__ import annotations

from pathlib import Path

import pytest
from site_builder.check import problems_of

GOOD = '<h1 id="top">A</h1><a href="b/c.html#deep">b</a><a href="#top">t</a><a href="https://a.b">web</a>'


def problems(site: Path, text: str) -> list[str]:
    (site / "b").mkdir()
    (site / "a.html").write_text(text)
    (site / "b" / "c.html").write_text('<h2 id="deep">C</h2><a href="../a.html">a</a><img src="../p.svg">')
    (site / "p.svg").touch()
    return problems_of(site)


def test_a_good_site_has_no_problem(tmp_path: Path) -> None:
    assert problems(tmp_path, GOOD) == []


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('<a href="d.html">', "a.html links to d.html, which does not exist"),
        ('<a href="b/c.html#flat">', "a.html links to b/c.html#flat, but there is no such heading"),
        ('<a href="#flat">', "a.html links to #flat, but there is no such heading"),
        ('<img src="q.svg">', "a.html links to q.svg, which does not exist"),
        ('<script src="https://a.b/c.js">', "a.html fetches https://a.b/c.js from the network"),
        ('<link rel="stylesheet" href="//a.b/c.css">', "a.html fetches //a.b/c.css from the network"),
    ],
)
def test_a_problem_is_named(text: str, problem: str, tmp_path: Path) -> None:
    assert problems(tmp_path, text) == [problem]
