"""HTML elements; their contents are escaped unless they are elements themselves."""

from __future__ import annotations

import html
from collections.abc import Iterable

_VOID = frozenset({"br", "hr", "link", "meta"})


class Markup(str):
    """Text that already is HTML."""

    __slots__ = ()


def element(tag: str, *content: str, **attributes: str | None) -> Markup:
    """Return an element.

    Args:
        tag: Name of the element.
        content: Texts, which are escaped, and elements, which are not.
        attributes: Values by name, with "_" for "-"; a trailing "_" is removed (`class_`). None omits the attribute.
    """
    words = [f' {name.rstrip("_").replace("_", "-")}="{text(value)}"' for name, value in attributes.items() if value]
    begin = f"<{tag}{''.join(words)}>"
    return Markup(begin if tag in _VOID else f"{begin}{joined(content)}</{tag}>")


def joined(content: Iterable[str]) -> Markup:
    """Concatenate texts, which are escaped, and elements."""
    return Markup("".join(each if isinstance(each, Markup) else text(each) for each in content))


def text(value: str) -> str:
    """Escape a text for HTML."""
    return html.escape(printable(value))


def printable(value: str) -> str:
    """Replace characters that cannot be displayed, that HTML forbids, or that reverse the text direction."""
    if value.isprintable():
        return value
    return "".join(each if each in "\t\n\xa0" or each.isprintable() else "\ufffd" for each in value)
