"""Changes of attributes are seen in containers and objects too, with a bound on the work."""

from __future__ import annotations

import random
from collections import OrderedDict, deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from trainer_kit.checkpoint import attribute_notes
from trainer_kit.checkpoint.attribute_notes import AttributeNotes


def note(value: Any) -> Any:
    return AttributeNotes().note(value)


CHANGES: list[tuple[Any, Callable[[Any], object]]] = [
    ({}, lambda value: value.update(a=torch.ones(2))),
    ({"a": torch.ones(2)}, lambda value: value.update(a=torch.ones(2))),
    ({"a": torch.ones(2)}, lambda value: value["a"].add_(1)),
    ({"a": torch.ones(2)}, lambda value: value.clear()),
    (OrderedDict(a=1.0), lambda value: value.update(a=2.0)),
    ({number: [0] for number in range(1000)}, lambda value: value[999].append(1)),
    ([torch.ones(2)] * 12, lambda value: value.append(torch.ones(2))),
    (deque([1.0, 2.0], maxlen=2), lambda value: value.append(3.0)),
    (deque(range(1000), maxlen=1000), lambda value: value.append(3)),
    ({"a": (torch.ones(2), np.zeros(2))}, lambda value: value["a"][1].__iadd__(1)),
    (np.zeros(3), lambda value: value.__iadd__(1)),
    (SimpleNamespace(a=1, b="x"), lambda value: setattr(value, "a", 2)),
    (SimpleNamespace(a={"b": torch.ones(2)}), lambda value: value.a["b"].mul_(2)),
    ([random.Random(3)], lambda value: value[0].random()),
]


@pytest.mark.parametrize(("value", "change"), CHANGES, ids=lambda value: type(value).__name__)
def test_a_change_shows(value: Any, change: Callable[[Any], object]) -> None:
    before = note(value)
    assert before is not None
    assert note(value) == before
    change(value)
    assert note(value) != before


@pytest.mark.parametrize(
    "value",
    [
        "text", True, SimpleNamespace(a="x"), nn.Parameter(torch.ones(2)), nn.Linear(2, 2), test_a_change_shows, np,
        np.zeros(2**16), np.array([object()]), SimpleNamespace(a=SimpleNamespace(b=SimpleNamespace(c=[1]))),
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_other_values_are_passed_over(value: Any) -> None:
    assert note(value) is None


def test_a_part_of_several_values_and_a_loop_are_looked_at_once() -> None:
    shared: list[Any] = [1]
    shared.append(shared)
    notes = AttributeNotes()
    assert notes.note(shared) == (2, ["1", None])
    assert notes.note({"a": shared}) == (1, [None])


def test_the_work_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = []
    whole = attribute_notes._parts
    monkeypatch.setattr(attribute_notes, "_parts", lambda value: looks.append(value) or whole(value))
    notes = AttributeNotes()
    for _ in range(1000):
        notes.note([[number] for number in range(1000)])
    assert len(looks) < 1100
