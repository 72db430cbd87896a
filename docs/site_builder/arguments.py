"""The table of all arguments."""

from __future__ import annotations

import dataclasses
import inspect
import types
from collections.abc import Iterable
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from site_builder import api
from site_builder.settings import fields_of_transformers, other_names
from site_builder.tables import code, sections, table
from trainer_kit import TrainingArguments
from trainer_kit.config.lightning_names import LIGHTNING_NAMES
from trainer_kit.config.parser_hints import Accepts
from trainer_kit.config.transformers_names import TRANSFORMERS_NAMES
from trainer_kit.config.validation import Rule

_FILTER = """<div class="filter" markdown="0">
<label for="filter-arguments">Filter</label>
<input id="filter-arguments" type="search" data-filter="arguments" placeholder="a name, a word or a default">
<output for="filter-arguments"></output>
</div>
"""


def arguments() -> str:
    """Return the table of all arguments, and the class itself."""
    head = ["argument", "default", "meaning", "transformers' name"]
    return (
        f"## All arguments\n\n{_FILTER}\n"
        f'<div id="arguments" class="wide" markdown="1">\n\n{table(head, rows())}\n\n</div>\n\n'
        "## Settings that are no arguments\n\n"
        "Those of [transformers](../coming-from/transformers.md#settings) and of "
        "[Lightning](../coming-from/lightning.md#settings) are refused with a sentence, or have no effect for a "
        "reason, unless their value is what happens anyway.\n\n"
        f"{api.listing('arguments')}"
    )


def rows() -> list[list[str]]:
    """Return the rows: name, default, meaning with allowed values and Lightning's names, transformers' names."""
    meanings = sections(TrainingArguments)["parameters"]
    theirs, lightnings = other_names(TRANSFORMERS_NAMES), other_names(LIGHTNING_NAMES)
    same = fields_of_transformers()
    made = []
    for field in dataclasses.fields(TrainingArguments):
        names = [code(field.name)] if field.name in same else []
        names += map(code, theirs.get(field.name, ()))
        made.append([
            f'<span id="arguments.{field.name}"></span>{code(field.name)}',
            default_of(field),
            f"{meanings[field.name]}<br>*Allowed:* {allowed(field)}.{_named(lightnings.get(field.name, ()))}",
            ", ".join(names),
        ])  # fmt: skip
    return made


def _named(names: Iterable[str]) -> str:
    listed = ", ".join(map(code, names))
    return f"<br>*Lightning:* {listed}." if listed else ""


def default_of(field: dataclasses.Field[Any]) -> str:
    """Return the default of a field as code; what the launcher decides is named."""
    if field.default is not dataclasses.MISSING:
        return code(repr(field.default))
    assert field.default_factory is not dataclasses.MISSING
    if getattr(field.default_factory, "__module__", "") == "trainer_kit.config.environment":
        return f"{code(repr(field.default_factory()))}, or the launcher's"
    return code(repr(field.default_factory()))


def allowed(field: dataclasses.Field[Any]) -> str:
    """Return the values that a field takes."""
    hint = TrainingArguments.__annotations__[field.name]
    accepts = next(each for each in get_args(hint) if isinstance(each, Accepts))
    return ", or ".join(dict.fromkeys(_kinds(accepts.hint)))


def _kinds(hint: Any) -> list[str]:
    origin = get_origin(hint)
    if origin is Annotated:
        kind, *marks = get_args(hint)
        sentences = [mark.text for mark in marks if isinstance(mark, Rule)]
        return sentences or _kinds(kind)
    if origin is Literal:
        return [", ".join(map(code, map(repr, get_args(hint))))]
    if origin in (Union, types.UnionType):
        return [kind for member in get_args(hint) for kind in _kinds(member)]
    if origin is dict:
        return ["a dict by name"]
    names = {type(None): "None", str: "a text", bool: "`True`, `False`", int: "a whole number", float: "a number"}
    return [names.get(hint) or code(inspect.formatannotation(hint))]
