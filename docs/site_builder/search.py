"""What the search finds, and in which order; the generator has no setting for either.

Words are compared without marks: an Arabic word is found with and without its diacritics.

Guides come before the reference for words that both have. The search compares two results by the field that has the
words (title, path, text), then by how early the words come in it, then by the place in the index. So paths and titles
decide.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

_GUIDES = ("tutorials", "how-to")
_COMPARED, _WITHOUT_MARKS = '.normalize("NFKD")', '.normalize("NFKD").replace(/[\\p{M}\\u0640]/gu,"")'
"""How the search's script spells the words that it compares: decomposed, then without diacritics and kashida."""

_MARKS = re.compile("[\u064b-\u0652\u0670\u0640]")
"""Diacritics and kashida of Arabic, which are characters of their own."""

_ASSIGNED = "var __index = "
"""What the index begins with in the file that pages use without a server."""


def rank(site: Path) -> None:
    """Put the guides first in the search of a language's site, and leave diacritics out of what it shows.

    The search marks as many characters of a result as it compared, so a word with diacritics would lose its end.

    Raises:
        ValueError: If the generator wrote the index in another form.
    """
    index = json.loads((site / "search.json").read_text(encoding="utf-8"))
    index["items"] = ranked(map(without_marks, index["items"]))
    text = json.dumps(index, ensure_ascii=False, separators=(",", ":"))
    (site / "search.json").write_text(text, encoding="utf-8")
    script = site / "search.js"
    if not script.read_text(encoding="utf-8").startswith(_ASSIGNED):
        raise ValueError(f"{script} does not begin with '{_ASSIGNED}'; adapt search.py to this generator")
    script.write_text(f"{_ASSIGNED}{text}", encoding="utf-8")


def ignore_marks(site: Path) -> None:
    """Make the search of a language's site compare words without their marks, in the index and in what is typed.

    Raises:
        ValueError: If the generator's script compares words in another way.
    """
    folder = site / "assets" / "javascripts" / "workers"
    scripts = {path: path.read_text(encoding="utf-8") for path in folder.glob("search.*.js")}
    if sum(text.count(_COMPARED) for text in scripts.values()) != 1:
        raise ValueError(f"the search in {folder} does not have '{_COMPARED}' once; adapt search.py to this generator")
    for path, text in scripts.items():
        path.write_text(text.replace(_COMPARED, _WITHOUT_MARKS), encoding="utf-8")


def without_marks(item: dict[str, Any]) -> dict[str, Any]:
    """Return an item of the index whose title, path and text have no diacritics."""
    plain = {name: _MARKS.sub("", item[name]) for name in ("title", "text")}
    return item | plain | {"path": [_MARKS.sub("", each) for each in item["path"]]}


def ranked(items: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the items of the index, guides first, with paths and titles that rank them before the others.

    - The path of a section in a guide ends with the section, so that its words are found in two fields. It begins with
      the page, so that they are found early.
    - The path of any other page is its part of the site.
    - The title of an attribute or a method is the whole name, whose words come late.
    """
    changed = []
    for item in items:
        path, title = item["path"], item["title"]
        anchor = item["location"].partition("#")[2]
        if _is_guide(item):
            path = [*path[1:], *([title] if anchor else [])]
        else:
            path = path[:1]
            name = anchor.rpartition(".")[2]
            if anchor.startswith("trainer_kit.") and title.startswith(name):
                title = anchor + title.removeprefix(name)
        changed.append(item | {"path": path, "title": title})
    return sorted(changed, key=lambda item: not _is_guide(item))


def _is_guide(item: dict[str, Any]) -> bool:
    return item["location"].split("/")[0] in _GUIDES
