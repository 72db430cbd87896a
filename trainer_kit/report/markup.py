"""HTML, made of elements whose texts are escaped unless they are elements themselves."""

from __future__ import annotations

import html
from collections.abc import Iterable

_VOID = frozenset({"br", "hr", "link", "meta"})


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


def element(tag: str, *content: str, **attributes: str | None) -> Markup:
    """An element.

    Args:
        tag: Its name.
        content: Texts, which are escaped, and elements, which are not.
        attributes: By name, with "_" for "-"; a trailing "_" is left out (`class_`). None leaves out the attribute.
    """
    words = [f' {name.rstrip("_").replace("_", "-")}="{text(value)}"' for name, value in attributes.items() if value]
    begin = f"<{tag}{''.join(words)}>"
    return Markup(begin if tag in _VOID else f"{begin}{joined(content)}</{tag}>")


def joined(content: Iterable[str]) -> Markup:
    """Texts and elements one after the other."""
    return Markup("".join(each if isinstance(each, Markup) else text(each) for each in content))


def text(value: str) -> str:
    """A text in which HTML finds nothing but text."""
    return html.escape(printable(value))


def printable(value: str) -> str:
    """A text whose characters can all be shown; those that HTML forbids, or that turn the line around, are replaced."""
    if value.isprintable():
        return value
    return "".join(each if each in "\t\n\xa0" or each.isprintable() else "\ufffd" for each in value)
