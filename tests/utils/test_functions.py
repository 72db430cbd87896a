"""What functions hold is found by name, without calling them."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

from trainer_kit.utils.functions import globals_of, held_by

NUMBER, NAMED_LIKE_AN_ATTRIBUTE = 7, 8


def reads(thing: Any, first: int = 1, *, last: int = 2) -> Any:
    def inner() -> int:
        return NUMBER

    return thing.NAMED_LIKE_AN_ATTRIBUTE, inner, missing  # type: ignore[name-defined]  # noqa: F821


def closure() -> Callable[[], Any]:
    own = 5
    if NUMBER < 0:
        empty = 1
    return lambda: (own, empty)


def test_closures_and_defaults_are_found() -> None:
    made = closure()
    assert isinstance(made, types.FunctionType)
    assert dict(held_by(made)) == {"own": 5}
    assert list(held_by(reads)) == [(0, 1), ("last", 2)]  # type: ignore[arg-type]


def test_globals_of_inner_functions_are_found_and_attributes_are_not() -> None:
    assert list(globals_of(reads)) == [("missing", None), ("NUMBER", 7)]  # type: ignore[arg-type]
