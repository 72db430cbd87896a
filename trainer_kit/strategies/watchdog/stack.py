"""The code location of a thread, as another thread sees it."""

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
_ENCLOSING = "watched"  # the method that encloses collectives says nothing about them
_WAITS_IN = (_STRATEGIES, *(os.path.join(_TORCH, *part, "") for part in _PARTS))
# Installed packages are in a folder of the standard library.
_LIBRARIES = (_TORCH, os.path.join(os.path.dirname(os.__file__), ""), "<frozen")


class StackLocation(NamedTuple):
    """Code location of a thread.

    Attributes:
        place: The function and its caller, for people.
        waits: Whether it is in a collective or a backward pass, where it may wait for other processes.
        inside: Whether it is in a call of trainer_kit or torch that may wait for a GPU, which in turn may wait for
            other processes. Saving does not count.
    """

    place: str = "a place not known"
    waits: bool = False
    inside: bool = False


class _Frame(NamedTuple):
    file: str
    name: str
    line: int


def locate(frame: FrameType | None, error: BaseException | None = None, hidden: str = "") -> StackLocation:
    """Return where a thread is, or was when it raised an error.

    Args:
        frame: The thread's innermost frame; None if the thread has ended.
        error: The error raised below that frame; None: the thread's present location.
        hidden: A file whose frames are ignored.
    """
    inner = list(walk_tb(error.__traceback__)) if error is not None else []
    outer = list(walk_stack(frame)) if frame is not None else []  # None would mean the caller
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
    """Describe frames: "backward, called in _pass (trainer_kit/loop/train_step.py:201)" or "f (project/data.py:12)"."""
    shown = 0
    if waits:
        public = [
            number
            for number, frame in enumerate(frames)
            if frame.file.startswith(_WAITS_IN) and not frame.name.startswith(("_", "<", _ENCLOSING))
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
