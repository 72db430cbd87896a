"""Type hints and metadata of a dataclass's fields that command line parsers understand."""

from __future__ import annotations

import argparse
import functools
import operator
import types
import weakref
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints


class _TextOption(argparse.Action):
    """Keep the value as text, where argparse would make a dict of it and fail."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{**options, "type": str})

    def __call__(self, _: Any, namespace: argparse.Namespace, values: Any, __: str | None = None) -> None:
        setattr(namespace, self.dest, values)


class _PrecisionOption(argparse.Action):
    """Take a precision by its name, and transformers' `--bf16` and `--fp16`, alone or with a truth value."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._taken_into: Callable[[], argparse.Namespace | None] = lambda: None  # a default does not count

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, value: Any, option: str | None = None
    ) -> None:
        precision = str(option).lstrip("-")
        if precision in _PRECISIONS:
            is_on = str(value or True).lower()
            if is_on not in _TRUTH:
                parser.error(f"{option} takes true or false, or nothing, but got {value}")
            if _TRUTH[is_on]:
                self._set(parser, namespace, precision)
        elif value is None:
            parser.error(f"{option} needs the name of a precision")
        else:
            self._set(parser, namespace, str(value))

    def _set(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, precision: str) -> None:
        before = getattr(namespace, self.dest, precision) if self._taken_into() is namespace else precision
        self._taken_into = weakref.ref(namespace)
        if before != precision:
            parser.error(f"{before} and {precision} are both given as precision; give one")
        setattr(namespace, self.dest, precision)


_PRECISIONS = ("bf16", "fp16")
_TRUTH = {"yes": True, "true": True, "t": True, "y": True, "1": True,
          "no": False, "false": False, "f": False, "n": False, "0": False}  # fmt: skip

# transformers' HfArgumentParser gives the metadata of a field to `add_argument`.
FLAG: Mapping[str, Any] = {"nargs": "?", "const": True}
"""Metadata of a bool that may be None: its name alone means True."""
JSON_TEXT: Mapping[str, Any] = {"action": _TextOption}
"""Metadata of a dict, which the dataclass reads from JSON text."""
PRECISION: Mapping[str, Any] = {"action": _PrecisionOption, "nargs": "?", "aliases": [f"--{p}" for p in _PRECISIONS]}
"""Metadata of the precision, which transformers sets by a flag for each."""


class Accepts(NamedTuple):
    """The values that a field accepts, where its hint is a plainer type.

    Attributes:
        hint: The type hint that values are checked by.
    """

    hint: Any


def plain_hint(hint: Any) -> Any:
    """Return the type hint for parsers in place of one that they do not understand.

    transformers' HfArgumentParser takes a union of one type with None or str, and OmegaConf neither a Literal nor a
    union with a dict. A dict of options is JSON text for them.
    """
    origin = get_origin(hint)
    if origin is Annotated:
        return plain_hint(get_args(hint)[0])
    if origin is Literal:
        return str
    if hint == list[Any]:  # names, and objects that a command line cannot give
        return list[str]
    if origin not in (Union, types.UnionType):
        return hint
    members = list(dict.fromkeys(map(plain_hint, get_args(hint))))
    if float in members and int in members:
        members.remove(int)
    if any(get_origin(member) is list for member in members) and str in members:
        members.remove(str)
    members = [str if get_origin(member) is dict else member for member in members]
    if str in members and int in members:
        members.remove(int)
    return functools.reduce(operator.or_, members)


def with_plain_hints(cls: type) -> type:
    """Replace the hints of a dataclass by plain ones, and keep its own as `Accepts`; return the class."""
    hints = get_type_hints(cls, include_extras=True)
    cls.__annotations__ = {name: Annotated[plain_hint(hint), Accepts(hint)] for name, hint in hints.items()}
    return cls
