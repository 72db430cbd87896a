"""The files by which a process asks its launcher for a place in the run, after a loss of others or as a newcomer.

The process writes `waits-N`, with N its number on the machine and the membership that it has left as content. The
launcher answers by `place-N`: the variables of the new place, null if new processes take over, or {} if the other
machines have continued without this one.

A newcomer gives `new/` and a digest of its training instead of a membership. It can join only the training with the
same digest, which the main process of the run writes to `open` while processes can join; an empty one says that they
cannot. When some are ready, the launcher of the main process creates `joins`.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from trainer_kit.errors import CutOffError

NEW = "new/"
"""What the words of a newcomer begin with, instead of a membership."""

_LOOK_SECONDS = 0.02
_OPEN, _JOINS = "open", "joins"


def ask_for_place(folder: Path, number: int, membership: str, is_stopped: Callable[[], bool]) -> dict[str, str] | None:
    """Ask the launcher for a new place, and wait for it.

    Args:
        folder: The folder that the launcher names.
        number: Number of this process on its machine.
        membership: The membership that it has left, or a newcomer's words.
        is_stopped: Returns whether to stop waiting.

    Returns:
        The variables of the new place; None if this process has to end.

    Raises:
        CutOffError: If the other machines have continued without this one.
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
    if variables == {}:
        raise CutOffError("the other machines have continued without this one; new processes join them")
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
        variables: The variables of its place; None if it has to end; {} if the other machines have continued without
            this one.
    """
    (folder / f"waits-{number}").unlink(missing_ok=True)
    _write(folder / f"place-{number}", json.dumps(variables))


def clear(folder: Path) -> None:
    """Forget the processes that have waited and ended."""
    for path in (*folder.glob("waits-*"), *folder.glob("place-*"), folder / _OPEN, folder / _JOINS):
        path.unlink(missing_ok=True)


def set_open(folder: Path, digest: str | None) -> None:
    """Say that processes with the same digest of their training can join this one; "": none can, None: no longer."""
    if digest is None:
        (folder / _OPEN).unlink(missing_ok=True)
    else:
        _write(folder / _OPEN, digest)


def open_for(folder: Path) -> str | None:
    """Return the digest of the training that processes can join, "" if they cannot; None: not known, or no longer."""
    try:
        return (folder / _OPEN).read_text()
    except FileNotFoundError:
        return None


def set_joining(folder: Path, is_joining: bool) -> None:
    """Say whether newcomers are ready to join."""
    if is_joining:
        (folder / _JOINS).touch()
    else:
        (folder / _JOINS).unlink(missing_ok=True)


def are_joining(folder: Path) -> bool:
    """Return whether newcomers are ready to join."""
    return (folder / _JOINS).exists()


def _write(path: Path, text: str) -> None:
    unfinished = path.with_name(f"new-{os.getpid()}-{path.name}")
    unfinished.write_text(text)
    unfinished.replace(path)
