"""The files by which a process that lost others of its run asks its launcher for a new place in the run.

The process writes `waits-N`, with N its number on the machine and the membership that it has left as content. The
launcher answers by `place-N`: the variables of the new place, or nothing if new processes take over.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path

_LOOK_SECONDS = 0.02


def ask_for_place(folder: Path, number: int, membership: str, is_stopped: Callable[[], bool]) -> dict[str, str] | None:
    """Ask the launcher for a new place, and wait for it.

    Args:
        folder: The folder that the launcher names.
        number: Number of this process on its machine.
        membership: The membership that it has left.
        is_stopped: Returns whether to stop waiting.

    Returns:
        The variables of the new place; None if this process has to end.
    """
    launcher = os.getppid()
    answer = folder / f"place-{number}"
    answer.unlink(missing_ok=True)
    _write(folder / f"waits-{number}", membership)
    while not answer.exists():
        if is_stopped() or os.getppid() != launcher:
            return None
        time.sleep(_LOOK_SECONDS)
    variables: dict[str, str] | None = json.loads(answer.read_text())
    return variables


def waiting(folder: Path) -> dict[int, str]:
    """Return the processes that wait for a place, and the memberships that they have left."""
    found = ((path, path.name.removeprefix("waits-")) for path in folder.glob("waits-*"))
    return {int(number): path.read_text() for path, number in found if number.isdigit()}


def give_place(folder: Path, number: int, variables: Mapping[str, str] | None) -> None:
    """Answer a process.

    Args:
        folder: See `ask_for_place`.
        number: Number of the process on its machine.
        variables: The variables of its place; None if it has to end.
    """
    (folder / f"waits-{number}").unlink(missing_ok=True)
    _write(folder / f"place-{number}", json.dumps(variables))


def clear(folder: Path) -> None:
    """Forget the processes that have waited and ended."""
    for path in (*folder.glob("waits-*"), *folder.glob("place-*")):
        path.unlink(missing_ok=True)


def _write(path: Path, text: str) -> None:
    unfinished = path.with_name(f"new-{path.name}")
    unfinished.write_text(text)
    unfinished.replace(path)
