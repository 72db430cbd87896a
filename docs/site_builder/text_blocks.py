"""Marks results and commands by what they hold, so that the style sheet wraps prose and keeps columns together."""

from __future__ import annotations

import html
import re

_BLOCK = re.compile(r'<div class="(language-(?:text|sh) highlight)">(<pre>.*?<code>)(.*?)</code>', re.DOTALL)
_TAG = re.compile(r"<[^>]*>")
_COLUMNS = {"text": re.compile(r"[^:\s] {2,}\S|[─│┬►]"), "sh": re.compile(r" {2,}#")}
"""Gaps between columns, not after a colon as in `curves:    runs/demo`, and lines of diagrams; comments of commands."""

_LINE = 79
"""Characters of code that fit on a wide screen, between the navigation and the button that copies."""


def with_marked_blocks(page: str) -> str:
    """Return the HTML of a page whose results and commands have a class that says how their lines may be broken.

    - `prose`: sentences, messages and commands, which may wrap anywhere.
    - `broad`: columns that are wider than the text of a wide screen.
    """
    return _BLOCK.sub(_marked, page)


def _marked(block: re.Match[str]) -> str:
    lines = html.unescape(_TAG.sub("", block[3])).splitlines()
    columns = _COLUMNS["sh" if "-sh" in block[1] else "text"]
    kind = " prose"
    if rows := [line for line in lines if columns.search(line)]:
        kind = " broad" if max(map(len, rows)) > _LINE else ""
    return f'<div class="{block[1]}{kind}">{block[2]}{block[3]}</code>'
