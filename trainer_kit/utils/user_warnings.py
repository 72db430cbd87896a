"""`warn`: Python warnings that show the user's own line of code, and `user_line`, which finds it."""

from __future__ import annotations

import sys
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


def user_line() -> tuple[str, int] | None:
    """Return file and number of the innermost line outside of trainer_kit and torch; None if there is none."""
    _, frame = _user_frame()
    return None if frame is None else (frame.f_code.co_filename, frame.f_lineno)


def _user_frame() -> tuple[int, FrameType | None]:
    """Return the innermost frame of the user's code, and its level seen from the caller's caller."""
    level, frame = 0, sys._getframe(1)
    found: FrameType | None = frame
    while found is not None and _package(found.f_globals) in _SKIPPED:
        level, found = level + 1, found.f_back
    return level + 1, found


def _package(names: dict[str, object]) -> str:
    name = str(names.get("__name__", ""))
    spec = names.get("__spec__")
    if name == "__main__" and spec is not None:  # `python -m trainer_kit`
        name = str(getattr(spec, "name", name))
    return name.partition(".")[0]
