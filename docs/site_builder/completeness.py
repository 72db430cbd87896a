"""Checks that the built reference has everything that is public."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from site_builder import api
from site_builder.check import Page
from site_builder.commands import anchor_of, commands, options_of
from site_builder.environment import variables
from site_builder.exceptions import tree
from trainer_kit import TrainingArguments
from trainer_kit.callback import HOOKS


class Public(NamedTuple):
    """Something public: the page of the reference that must have it, and its anchor there."""

    page: str
    anchor: str


def missing(site: Path) -> list[str]:
    """Return a sentence for each public thing that a built site lacks."""
    anchors: dict[str, set[str]] = {}
    for page in (site / "en" / "reference").glob("*.html"):
        anchors[page.stem] = Page(page.read_text(encoding="utf-8")).ids
    return [
        f"{thing.anchor} is public, but reference/{thing.page} does not have it"
        for thing in dict.fromkeys(everything())
        if thing.anchor not in anchors.get(thing.page, ())
    ]


def everything() -> Iterator[Public]:
    """Yield everything public: names and their members, hooks, arguments, commands, exceptions and variables."""
    for entry in api.entries().values():
        yield Public(entry.page, entry.path)
        for name in _members(entry):
            yield Public(entry.page, f"{entry.path}.{name}")
    for hook in HOOKS:
        yield Public("callbacks", f"trainer_kit.Callback.{hook}")
    for field in dataclasses.fields(TrainingArguments):
        yield Public("arguments", f"arguments.{field.name}")
    for command in commands():
        yield Public("command-line", anchor_of(command))
        for option in options_of(command.parser):
            yield Public("command-line", anchor_of(command, option))
    for _, kind in tree():
        yield Public("exceptions", f"{kind.__module__}.{kind.__name__}")
    for name in variables():
        yield Public("environment", name)


def _members(entry: api.Entry) -> list[str]:
    """Return the documented public methods and properties of a class, without those of bases that are shown too."""
    if not inspect.isclass(entry.value):
        return []
    names = [*vars(entry.value), *api.inherited_members(entry.value)]
    public = [name for name in names if not name.startswith("_")]
    return [name for name in public if _is_documented(inspect.getattr_static(entry.value, name))]


def _is_documented(member: object) -> bool:
    kinds = (property, classmethod, staticmethod)
    return (inspect.isfunction(member) or isinstance(member, kinds)) and bool(member.__doc__)
