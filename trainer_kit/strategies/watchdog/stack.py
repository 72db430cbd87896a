"""Where a thread of this process is, as another thread sees it."""

from __future__ import annotations

import os
from traceback import walk_stack, walk_tb
from types import FrameType
from typing import NamedTuple

import torch

_STRATEGIES = os.path.join(os.path.dirname(os.path.dirname(__file__)), "")
_PACKAGE = os.path.join(os.path.dirname(os.path.dirname(_STRATEGIES)), "")
_SAVING = os.path.join(_PACKAGE, "checkpoint", "format", "")
_TORCH = os.path.join(os.path.dirname(torch.__file__), "")
_PARTS = (("distributed",), ("autograd",), ("nn", "parallel"))
_WAITS_IN = (_STRATEGIES, *(os.path.join(_TORCH, *part, "") for part in _PARTS))
# What is installed lies below the standard library.
_LIBRARIES = (_TORCH, os.path.join(os.path.dirname(os.__file__), ""), "<frozen")


class StackLocation(NamedTuple):
    """Where a thread is.

    Attributes:
        place: The function and who called it, for people.
        waits: Whether it is in a collective or a backward pass, where it may wait for other processes.
        inside: Whether it is in a call of the engine that may wait for a GPU, which may itself wait for other
            processes; saving is none.
    """

    place: str = "a place not known"
    waits: bool = False
    inside: bool = False


class _Frame(NamedTuple):
    file: str
    name: str
    line: int


def locate(frame: FrameType | None, error: BaseException | None = None, hidden: str = "") -> StackLocation:
    """Where a thread is, or was when it raised an error.

    Args:
        frame: The thread's innermost frame.
        error: What was raised in a call of it.
        hidden: A file whose frames do not count.
    """
    inner = list(walk_tb(error.__traceback__)) if error is not None else []
    outer = list(walk_stack(frame)) if frame is not None else []  # None would be the caller of this function
    frames = [
        _Frame(each.f_code.co_filename, each.f_code.co_name, line)
        for each, line in inner[::-1] + outer
        if each.f_code.co_filename != hidden
    ]
    if not frames:
        return StackLocation()
    innermost = frames[0].file
    waits = innermost.startswith(_WAITS_IN)
    engine = any(each.file.startswith(_PACKAGE) for each in frames)
    saves = any(each.file.startswith(_SAVING) for each in frames)
    inside = innermost.startswith((_PACKAGE, _TORCH)) and engine and not saves
    return StackLocation(_described(frames, waits), waits, inside)


def _described(frames: list[_Frame], waits: bool) -> str:
    """Like "backward, called in _pass (trainer_kit/loop/train_step.py:201)", or "__getitem__ (project/data.py:12)"."""
    shown = 0
    if waits:
        public = [
            number
            for number, frame in enumerate(frames)
            if frame.file.startswith(_WAITS_IN) and not frame.name.startswith(("_", "<"))
        ]
        own = [number for number in public if frames[number].file.startswith(_STRATEGIES)]
        shown = (own or public or [0])[0]
    name = frames[shown].name
    for frame in frames[shown:]:
        library = frame.file.startswith(_LIBRARIES) and not frame.file.startswith(_PACKAGE)
        if not library and not frame.file.startswith(_STRATEGIES):
            where = f"{'/'.join(frame.file.split(os.sep)[-2:])}:{frame.line}"
            return f"{name} ({where})" if frame is frames[shown] else f"{name}, called in {frame.name} ({where})"
    return name
