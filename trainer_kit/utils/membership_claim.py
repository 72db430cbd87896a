"""`MembershipClaim`: which membership of an elastic run owns an output folder.

A file per membership, created exclusively: where two halves of a cut network see the same folder, one of them creates
it. The last main process has left such a file too, so that a half without it knows whether it sees the same folder.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
from pathlib import Path
from typing import NamedTuple

from trainer_kit.errors import CutOffError

PREFIX = ".membership-"
_REPORT = "claim"
_NAME = rf"{re.escape(PREFIX)}(\d+)-(.+)"


class MembershipPlace(NamedTuple):
    """A membership of the machines of an elastic run.

    Attributes:
        run: Unique ID of the run.
        number: Number of the membership.
        after: Number of the membership that it follows; 0 for the first.
        needs_claim: Whether it may follow only in a folder that the main process of that membership has claimed.
    """

    run: str
    number: int
    after: int = 0
    needs_claim: bool = False


_kept: set[Path] = set()
"""Claims of this process that its next training may use."""


class MembershipClaim:
    """Claim of a membership to a folder.

    Args:
        folder: The folder, which must exist when it is claimed.
        argument: Name of the argument that the user gives the folder by, for errors.
        place: The membership.
    """

    def __init__(self, folder: Path, argument: str, place: MembershipPlace) -> None:
        self.folder = folder
        self.argument = argument
        self.place = place

    def take(self) -> None:
        """Claim the folder, unless another membership follows the same one there.

        Raises:
            CutOffError: If one does, or this one may follow only in another folder.
            OSError: If the folder cannot be read or written.
        """
        place, path = self.place, self._path(self.place.number).absolute()
        is_own = path in _kept and path.exists()
        self._refuse(self._after(place.number if is_own else place.after))
        if is_own:  # by an earlier training of this process
            return
        goes_on = any(other.name == path.name for other in _kept)  # this process has shown it in another folder
        if place.needs_claim and not goes_on and not self._path(place.after).exists():
            raise CutOffError(
                f"{self.argument}={str(self.folder)!r} is not the folder of the last main process, so that the other "
                "machines may still be training there; make it one that all machines share"
            )
        content = json.dumps({"run": place.run, "membership": place.number, "host": socket.gethostname()})
        try:
            descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        except FileExistsError:
            self._refuse(place.number)
            raise
        with os.fdopen(descriptor, "w") as file:
            file.write(content)
        self._refuse(max((number for number in self._numbers() if number != place.number), default=0))

    def keep(self) -> None:
        """Let the next training of this process have the claim, once this one is over."""
        _kept.add(self._path(self.place.number).absolute())

    def newer(self) -> int | None:
        """Return the number of a newer membership of the same run that owns the folder; None if there is none."""
        return self._after(self.place.number) or None

    def remove_earlier(self) -> None:
        """Remove the files of other runs, and those that no membership can follow; requires the folder's lock."""
        for path in self.folder.glob(f"{PREFIX}*"):
            match = re.fullmatch(_NAME, path.name)
            if match and (match[2] != self.place.run or int(match[1]) < self.place.after):
                with contextlib.suppress(OSError):
                    path.unlink()

    def _refuse(self, number: int) -> None:
        if number > self.place.after:
            raise CutOffError(
                f"{self.argument}={str(self.folder)!r} belongs to membership {number} of this run: other "
                "machines continue without this one; start it again to join them"
            )

    def _after(self, number: int) -> int:
        return max((other for other in self._numbers() if other > number), default=0)

    def _numbers(self) -> list[int]:
        try:
            matches = [re.fullmatch(_NAME, name) for name in os.listdir(self.folder)]
        except FileNotFoundError:
            return []
        return [int(match[1]) for match in matches if match and match[2] == self.place.run]

    def _path(self, number: int) -> Path:
        return self.folder / f"{PREFIX}{number}-{self.place.run}"


def report_claim(progress: Path, number: int, is_held: bool) -> None:
    """Report to this machine's launcher whether the main process could claim the output folder.

    Args:
        progress: The launcher's progress file.
        number: Number of the membership.
        is_held: Whether it could.
    """
    progress.with_name(_REPORT).write_text(f"{number} {int(is_held)}")


def read_claim(progress: Path) -> tuple[int, bool]:
    """Return the number of the membership that a process reported last, and whether it holds the output folder."""
    try:
        number, is_held = progress.with_name(_REPORT).read_text().split()
    except (OSError, ValueError):
        return 0, False
    return int(number), is_held == "1"
