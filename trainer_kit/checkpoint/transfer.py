"""Files of a generation on their way from the memory of one machine to that of another one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
import xxhash

from trainer_kit.checkpoint import FileEntry

_PIECE_BYTES = 2**22


class Piece(NamedTuple):
    """A range of a file that is sent in one piece."""

    name: str
    start: int
    size: int


class Arrival:
    """Files that another process sends, on their way to this machine's memory.

    Args:
        folder: Where they are written.
        entries: Their entries.

    Attributes:
        folder: The argument of the same name.
    """

    def __init__(self, folder: Path, entries: Mapping[str, FileEntry]) -> None:
        self.folder = folder
        self._entries = entries
        self._pieces = pieces_of(entries)
        self._done = 0
        self._digests = {name: xxhash.xxh3_64() for name in entries}
        self._problem: str | None = None

    @property
    def is_waiting(self) -> bool:
        """Whether a piece has not arrived."""
        return self._done < len(self._pieces)

    def buffer(self) -> torch.Tensor:
        """Return memory for the next piece."""
        return torch.empty(self._pieces[self._done].size, dtype=torch.uint8, device="cpu")

    def write(self, content: torch.Tensor) -> None:
        """Write the next piece; after an error, only count it."""
        piece, self._done = self._pieces[self._done], self._done + 1
        view = content.numpy().data
        self._digests[piece.name].update(view)
        if self._problem is None:
            path = self.folder / piece.name
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                with open(path, "ab") as file:
                    file.write(view)
            except OSError as error:
                self._problem = str(error)

    def finish(self) -> str | None:
        """Compare the checksums; return what failed."""
        for name, entry in self._entries.items():
            if (found := self._digests[name].hexdigest()) != entry.checksum:
                return f"{name} arrived with the checksum {found} instead of {entry.checksum}"
        try:
            for name, entry in self._entries.items():
                if not entry.size:
                    (self.folder / name).touch()
        except OSError as error:
            self._problem = self._problem or str(error)
        return self._problem


def pieces_of(entries: Mapping[str, FileEntry]) -> list[Piece]:
    """Return the pieces in which files are sent, in order."""
    return [
        Piece(name, start, min(_PIECE_BYTES, entry.size - start))
        for name, entry in sorted(entries.items())
        for start in range(0, entry.size, _PIECE_BYTES)
    ]


def read_piece(folder: Path, piece: Piece) -> tuple[torch.Tensor, str | None]:
    """Return a piece of a file, and what failed."""
    content = torch.zeros(piece.size, dtype=torch.uint8, device="cpu")
    try:
        with open(folder / piece.name, "rb") as file:
            file.seek(piece.start)
            if file.readinto(content.numpy().data) != piece.size:
                return content, f"{folder / piece.name} has become shorter"
    except OSError as error:
        return content, str(error)
    return content, None
