"""Digests of samples."""

from __future__ import annotations

import collections
import dataclasses
import datetime
import enum
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from trainer_kit.data.digest import digest


class Graph:
    def __init__(self, x: torch.Tensor) -> None:
        self.x = x

    def to_dict(self) -> dict[str, Any]:
        return {"x": self.x}


DIFFERENT = [
    1, 1.5, "a", b"a", None, True, [1, 2], [1, 3], (1, 2), {"a": 1}, {"b": 1}, {"a": [1]}, {"a": torch.tensor(1)},
    torch.tensor(1), torch.tensor(1.0), torch.zeros(2, 3), torch.zeros(3, 2), torch.zeros(0),
    torch.ones(2, 3).bfloat16(),
    np.arange(3), np.arange(4), np.float32(2), [torch.tensor(1)], [torch.tensor(1), 2], Graph(torch.ones(2)),
    Graph(torch.zeros(2)), {"a": np.ones(2), "b": "text"}, ["a", "b"], ["ab"],
]  # fmt: skip


@dataclasses.dataclass(slots=True)
class Slotted:
    x: Any


class Color(enum.Enum):
    RED = 1
    BLUE = 2


class Plain:
    def __init__(self, *words: str) -> None:
        self.words = list(words)
        self.tags = {word.upper() for word in words}


def objects() -> list[Any]:
    """Objects, each with its own copy of equal parts."""
    long, other = "".join(["lo", "ng"]), "".join(["ot", "her"])
    return [
        Plain(long, other), Plain(long, long), Slotted([long]), Slotted({other}), {long, other}, frozenset([long]),
        Color.RED, Color.BLUE, datetime.date(2020, 1, 2), Path(long), [{long}, np.array([long, None], dtype=object)],
        np.array([long, {other}], dtype=object), np.arange(6).reshape(2, 3).T, [Plain(other), torch.ones(1)],
        collections.OrderedDict({long: Plain(other)}), collections.Counter([long, other]), Plain, len,
    ]  # fmt: skip


def digests_of_objects() -> list[str | None]:
    return [None if (found := digest([each])) is None else found.hex() for each in objects()]


def test_equal_objects_have_the_same_digest() -> None:
    found = digests_of_objects()
    assert None not in found
    assert len(set(found)) == len(found)
    assert digests_of_objects() == found
    text = "".join(["lo", "ng"])  # equal parts that are one object, or two
    assert digest([Plain(text, text)]) == digest([Plain("long", "".join(["l", "ong"]))])
    assert digest([threading.Lock()]) is None
    cycle = Slotted(None)
    cycle.x = cycle
    assert digest([cycle]) is None


@pytest.mark.slow
def test_equal_objects_have_the_same_digest_in_another_process() -> None:
    environment = os.environ | {
        "PYTHONHASHSEED": "1",  # of strings, and so of the order of sets
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path]),
    }
    command = f"import {__name__} as there; print(*there.digests_of_objects())"
    told = subprocess.run(
        [sys.executable, "-c", command], env=environment, capture_output=True, text=True, check=True, timeout=120
    ).stdout.split()
    assert told == digests_of_objects()


def test_what_differs_has_another_digest_and_what_is_equal_the_same() -> None:
    import copy

    found = [digest([value]) for value in DIFFERENT]
    assert None not in found
    assert len(set(found)) == len(found)
    assert [digest([copy.deepcopy(value)]) for value in DIFFERENT] == found
    assert digest([torch.zeros(1, device="meta")]) is None
    assert digest([lambda: None]) is None
    text = "".join(["long", "er"])
    assert digest([[text, text]]) == digest([["longer", "".join(["lo", "nger"])]])  # one object or two
    assert digest([torch.arange(6).reshape(2, 3).T]) == digest([torch.arange(6).reshape(2, 3).T.contiguous()])
