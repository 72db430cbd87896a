"""Type hints that command line parsers understand, and the values that fields accept."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, Literal, get_args, get_type_hints

import pytest

from trainer_kit.config.arguments import TrainingArguments
from trainer_kit.config.parser_hints import Accepts, plain_hint, with_plain_hints
from trainer_kit.config.validation import Rule, check_values


@pytest.mark.parametrize(
    ("hint", "plain"),
    [
        (int, int),
        (Annotated[int, Rule("", bool)] | None, int | None),
        (Literal["a", "b"], str),
        (Literal["a"] | None, str | None),
        (int | str, str),
        (int | float, float),
        (bool | dict[str, Any], bool | str),
        (str | list[str], list[str]),
        (list[int] | None, list[int] | None),
        (dict[str, Any], dict[str, Any]),
    ],
)
def test_plain_hints(hint: Any, plain: Any) -> None:
    assert plain_hint(hint) == plain


def test_a_dataclass_accepts_what_its_own_hints_say() -> None:
    @dataclasses.dataclass
    class Settings:
        size: int | str = 3

    with_plain_hints(Settings)
    assert get_type_hints(Settings) == {"size": str}
    assert get_args(Settings.__annotations__["size"])[1] == Accepts(int | str)
    given = Settings(5)
    check_values(given)
    assert given.size == 5


def test_each_hint_of_the_arguments_is_a_type_or_an_optional_one() -> None:
    for name, hint in get_type_hints(TrainingArguments).items():
        members = get_args(hint) if type(hint) is type(int | None) else (hint,)
        assert len(members) == 1 or members[1] in (type(None), str), name
