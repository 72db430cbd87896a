"""What the starts of a script wrote down, and the first difference between two of them."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

PARTS = {
    "ids": "sample ids",
    "batch": "batch",
    "loss": "loss",
    "gradients": "gradients",
    "hyperparameters": "learning rate",
    "model": "model",
    "unsaved": "buffer that is not saved",
    "optimizer": "optimizer",
    "states": "state",
    "figures": "record",
    "end": "end of the training",
}
"""What is compared, in the order in which one thing in a step follows from another, and what it is called."""

_RESTORED = ("model", "optimizer", "states")
"""What a checkpoint brings back: compared before the first step that follows it."""


@dataclasses.dataclass(frozen=True)
class Line:
    """Marks of one step of one process.

    Attributes:
        step: Number of the step that is over; the first line of a start is the state that it begins with.
        parts: Marks by part (see `PARTS`) and name; all must be equal.
        hints: What may explain a difference, but need not be equal: "attributes" (of the user's objects),
            "samples" (one mark a sample).
    """

    step: int
    parts: dict[str, dict[str, str]]
    hints: dict[str, dict[str, str]]


@dataclasses.dataclass(frozen=True)
class Difference:
    """The first place where two lines of a step differ.

    Attributes:
        step: The step.
        part: One of `PARTS`.
        name: What in it.
        expected: Its mark in the straight run; None where it is missing there.
        found: Its mark in the other one.
        others: How many further marks of this part differ.
        is_restored: Whether it is the state that a resume begins with.
        rank: The process.
    """

    step: int
    part: str
    name: str
    expected: str | None
    found: str | None
    others: int
    is_restored: bool
    rank: int = 0

    @property
    def place(self) -> str:
        """How the recorder calls the tensor."""
        return f"{self.part}.{self.name}"


def records_file(folder: Path, name: str, rank: int) -> Path:
    """The file that a process of a start writes its lines to."""
    return folder / f"{name}-{rank}.jsonl"


def read_lines(path: Path) -> tuple[dict[str, Any], list[Line]]:
    """What a start wrote about itself, and its lines; both empty where it never came so far.

    The last line of a process that was killed may be torn.
    """
    texts = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
    entries = [json.loads(text) for text in texts if text.endswith("\n")]
    return (entries[0] if entries else {}), [Line(**entry) for entry in entries[1:]]


def first_difference(expected: Line, found: Line, is_restored: bool = False) -> Difference | None:
    """The first place where two lines of the same step differ; None where all bits are equal.

    Args:
        expected: Of the straight run.
        found: Of the other one.
        is_restored: Whether `found` is the state that a resume begins with, which says nothing of the step before.
    """
    for part in _RESTORED if is_restored else PARTS:
        one, other = expected.parts.get(part, {}), found.parts.get(part, {})
        differing = [name for name in {**one, **other} if one.get(name) != other.get(name)]
        if differing:
            name = differing[0]
            return Difference(found.step, part, name, one.get(name), other.get(name), len(differing) - 1, is_restored)
    return None
