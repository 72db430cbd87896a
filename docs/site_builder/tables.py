"""Markdown: tables, and sections of a docstring."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from typing import Any

from griffe import Docstring, DocstringSectionKind


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table; a line break in a cell becomes a space, and a bar is kept from ending the cell."""
    lines = [head, ["---"] * len(head), *([_cell(text) for text in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "&#124;")


def code(text: object) -> str:
    """Return a text as inline code; a bar, which would end a table's cell, is written as HTML."""
    plain = str(text)
    if "|" not in plain:
        return f"`{plain}`"
    escaped = plain.replace("&", "&amp;").replace("<", "&lt;").replace("|", "&#124;")
    return f"<code>{escaped}</code>"


def sections(thing: Any) -> dict[str, Any]:
    """Return the parts of a thing's docstring by kind: the text, and the entries by name of each section.

    Returns:
        `{"text": str, "parameters": {name: description}, "attributes": {…}}`, without what the docstring lacks.
    """
    found: dict[str, Any] = {}
    for section in Docstring(inspect.getdoc(thing) or "").parse("google", warnings=False):
        if section.kind is DocstringSectionKind.text:
            found["text"] = "\n\n".join([*([found["text"]] if "text" in found else []), section.value])
        elif section.kind in (DocstringSectionKind.parameters, DocstringSectionKind.attributes):
            found[section.kind.value] = {entry.name: entry.description for entry in section.value}
    return found


def first_sentence(thing: Any) -> str:
    """Return the first line of a thing's docstring."""
    return (inspect.getdoc(thing) or "").partition("\n")[0]
