"""Marks pages and tables by what they hold: the style sheet needs no `:has()`, by which browsers take seconds."""

from __future__ import annotations

import re

_KINDS = {
    "side-by-side": re.compile(r'<div class="side-by-side">'),
    "wide": re.compile(r'<div class="wide"'),
    "commands": re.compile(r'<h1 id="command-line">'),
}
_HEAD = re.compile(r"<table>(\s*<thead>\s*<tr>.*?</tr>)", re.DOTALL)
_MANY = 7
"""Columns from which each is narrow."""


def with_marked_layout(page: str) -> str:
    """Return the HTML of a page whose body names in `data-holds` what the page holds, and whose tables are marked.

    A table of seven columns or more has `data-columns="many"`.
    """
    held = [kind for kind, text in _KINDS.items() if text.search(page)]
    if held:
        page = page.replace("<body ", f'<body data-holds="{" ".join(held)}" ', 1)
    return _HEAD.sub(_marked, page)


def _marked(table: re.Match[str]) -> str:
    columns = len(re.findall(r"<th[ >]", table[1]))
    return f'<table data-columns="many">{table[1]}' if columns >= _MANY else table[0]
