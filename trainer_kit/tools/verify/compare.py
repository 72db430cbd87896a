"""Records of a script's starts, and the first difference between two of them."""

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
"""Names of the compared parts, in the order of their dependence within a step."""

_RESTORED = ("model", "optimizer", "states")
"""Parts that a checkpoint restores, compared before the first step after it."""


@dataclasses.dataclass(frozen=True)
class Line:
    """Marks of one step of one process.

    Attributes:
        step: Number of the completed step; the first line of a start is its initial state.
        parts: Marks by part (see `PARTS`) and name; all must be equal.
        hints: Marks that may explain a difference and may differ: "attributes" (of the user's objects), "samples" (one
            mark per sample).
    """

    step: int
    parts: dict[str, dict[str, str]]
    hints: dict[str, dict[str, str]]


@dataclasses.dataclass(frozen=True)
class Difference:
    """First difference between two lines of a step.

    Attributes:
        step: The step.
        part: One of `PARTS`.
        name: Name within the part.
        expected: Mark in the straight run; None if it is missing there.
        found: Mark in the other run; None if it is missing there.
        others: Number of further marks of this part that differ.
        is_restored: Whether it is in the state that a resume begins with.
        rank: Rank of the process.
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
        """The recorder's name of the tensor."""
        return f"{self.part}.{self.name}"


def records_file(folder: Path, name: str, rank: int) -> Path:
    """Return the file that a process of a start writes its lines to."""
    return folder / f"{name}-{rank}.jsonl"


def read_lines(path: Path) -> tuple[dict[str, Any], list[Line]]:
    """Return the header of a start, and its lines; both empty if the start did not begin to record.

    The last line of a killed process may be incomplete; it is skipped.

    Args:
        path: File of a process.
    """
    texts = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
    entries = [json.loads(text) for text in texts if text.endswith("\n")]
    return (entries[0] if entries else {}), [Line(**entry) for entry in entries[1:]]


def first_difference(expected: Line, found: Line, is_restored: bool = False) -> Difference | None:
    """Return the first difference between two lines of the same step; None if all bits are equal.

    Args:
        expected: Line of the straight run.
        found: Line of the other run.
        is_restored: Whether `found` is the state that a resume begins with, which has no marks of the step before.
    """
    for part in _RESTORED if is_restored else PARTS:
        one, other = expected.parts.get(part, {}), found.parts.get(part, {})
        differing = [name for name in {**one, **other} if one.get(name) != other.get(name)]
        if differing:
            name = differing[0]
            return Difference(found.step, part, name, one.get(name), other.get(name), len(differing) - 1, is_restored)
    return None
