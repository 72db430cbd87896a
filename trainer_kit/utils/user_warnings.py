"""`warn`: Python warnings that show the user's own line of code, and `user_lines`, which finds them."""

from __future__ import annotations

import sys
import traceback
import warnings
from types import FrameType

_SKIPPED = frozenset({"trainer_kit", "torch", "torch_xla", "contextlib", "functools", "concurrent", "threading"})
"""Packages whose frames are skipped."""


def warn(message: str) -> None:
    """Issue a warning at the innermost line outside of trainer_kit and torch, or without a line if there is none.

    Args:
        message: The problem, and what to do.
    """
    level, frame = _user_frame()
    if frame is None:  # in a thread of our own
        warnings.warn_explicit(message, UserWarning, "trainer_kit", 0)
    else:
        warnings.warn(message, stacklevel=level)


def user_lines() -> tuple[tuple[str, int], ...]:
    """Return file and number of all lines under way, from the innermost outside of trainer_kit and torch outwards."""
    _, frame = _user_frame()
    frames = () if frame is None else traceback.walk_stack(frame)
    return tuple((each.f_code.co_filename, line) for each, line in frames)


def _user_frame() -> tuple[int, FrameType | None]:
    """Return the innermost frame outside of trainer_kit and torch, and its `stacklevel` for the caller."""
    level, frame = 1, sys._getframe().f_back
    while frame is not None and _package(frame.f_globals) in _SKIPPED:
        level, frame = level + 1, frame.f_back
    return level, frame


def _package(names: dict[str, object]) -> str:
    name = str(names.get("__name__", ""))
    spec = names.get("__spec__")
    if name == "__main__" and spec is not None:  # `python -m trainer_kit`
        name = str(getattr(spec, "name", name))
    return name.partition(".")[0]
