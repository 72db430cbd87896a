from __future__ import annotations

import pytest
from torch import nn

from trainer_kit.utils.module_patterns import outermost_matches, prefixes


def model() -> nn.Module:
    inner = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.GELU()))
    return nn.ModuleDict({"left": inner, "right": nn.Sequential(nn.GELU())})


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("left", ["left"]),
        ("left*", ["left"]),
        ("Linear", ["left.0", "left.1.0"]),
        ("*.1", ["left.1"]),
        ("Seq*", ["left", "right"]),
        ("LEFT", []),
        ("", []),
    ],
)
def test_names_and_class_names_match(pattern: str, expected: list[str]) -> None:
    assert [*outermost_matches(model(), pattern, lambda module: True)] == expected


def test_a_module_that_is_no_candidate_hides_nothing() -> None:
    found = outermost_matches(model(), "*", lambda module: isinstance(module, nn.Linear))
    assert [*found] == ["left.0", "left.1.0"]


def test_prefixes_begin_with_the_innermost() -> None:
    assert [*prefixes("a.b.c")] == ["a.b", "a"]
    assert [*prefixes("a")] == []
