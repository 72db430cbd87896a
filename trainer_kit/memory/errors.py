"""Descriptions of errors in the user's code."""

from __future__ import annotations

import os
import sysconfig
import traceback
from pathlib import Path

# Folders of this library, of installed packages and of the interpreter.
_FOLDERS = (str(Path(__file__).parents[1]), *map(sysconfig.get_path, ("purelib", "platlib", "stdlib")))
_NOT_OF_USERS = (*(os.path.join(folder, "") for folder in _FOLDERS), "<")


def described(error: BaseException) -> str:
    """Return the error's type, its message in one line, and the last line of the user's own code in its traceback."""
    places = [
        f" ({frame.filename}, line {frame.lineno})"
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith(_NOT_OF_USERS)
    ]
    return ": ".join(filter(None, (type(error).__name__, " ".join(str(error).split())))) + "".join(places[-1:])


def first_line(error: Exception) -> str:
    """Return an error's type and first line; for an error in a data worker, its own last line."""
    lines = str(error).strip().splitlines() or [""]
    if lines[0].startswith("Caught ") and "in DataLoader worker" in lines[0]:  # the traceback follows
        return lines[-1]
    return f"{type(error).__name__}: {lines[0]}"
