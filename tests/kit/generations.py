"""Parts of generations, as processes leave them in memory."""

from __future__ import annotations

from pathlib import Path

from trainer_kit.checkpoint import Manifest
from trainer_kit.checkpoint.format.disk import write_file
from trainer_kit.checkpoint.generations import folder_name, write_manifest


def write_part(folder: Path, name: str, owner: int, holder: int, contents: dict[str, bytes]) -> None:
    """Write what a process holds of a generation of two processes with one file each."""
    whole = {"model": b"weights", "state/optimizer": b"moments"}
    part = folder / folder_name(name, owner, holder)
    (part / "state").mkdir(parents=True)
    entries = {each: write_file(part / each, [content]) for each, content in whole.items()}
    for each in whole.keys() - contents.keys():
        (part / each).unlink()
    for each, content in contents.items():
        (part / each).write_bytes(content)
    write_manifest(part, Manifest.of(entries, int(name[:8]), 2))
