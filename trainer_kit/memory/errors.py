"""What an error in a user's code says, for people."""

from __future__ import annotations

import os
import sysconfig
import traceback
from pathlib import Path

# Where the code of this library and of installed packages is, and the interpreter's own.
_FOLDERS = (str(Path(__file__).parents[1]), *map(sysconfig.get_path, ("purelib", "platlib", "stdlib")))
_NOT_OF_USERS = (*(os.path.join(folder, "") for folder in _FOLDERS), "<")


def described(error: BaseException) -> str:
    """The error's kind, its message in a line, and the last place in the user's own code that it came through."""
    places = [
        f" ({frame.filename}, line {frame.lineno})"
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith(_NOT_OF_USERS)
    ]
    return ": ".join(filter(None, (type(error).__name__, " ".join(str(error).split())))) + "".join(places[-1:])
