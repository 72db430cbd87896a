"""Checks of the objects that an `Accelerator` saves, and of the checkpoints that it loads or replaces."""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path
from typing import Any

from trainer_kit.checkpoint import CheckpointError, read_state, verify
from trainer_kit.checkpoint.format.manifest import MANIFEST_NAME, STATE_FOLDER, Manifest
from trainer_kit.checkpoint.format.trainer_state import BOOL, COUNT, OBJECT, TEXT, WHOLE, CheckedFile, or_none

logger = logging.getLogger("trainer_kit")

KINDS = ("models", "optimizers", "schedulers", "loaders")
"""Kinds of prepared objects that a checkpoint counts."""


def is_stateful(thing: Any) -> bool:
    """Return whether an object, not a class, has `state_dict` and `load_state_dict`."""
    return not isinstance(thing, type) and hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")


def check_state(directory: Path) -> None:
    """Verify a checkpoint and the saved state of the loop; leave a checkpoint of another program to `load_state`.

    Raises:
        CheckpointError: If a file is damaged, or a value is invalid for a loop.
    """
    verify(directory)
    if (state := read_state(directory, "accelerator")) is None:
        return
    file = CheckedFile(directory / STATE_FOLDER / "accelerator.json")
    file.check(state, {"counts": OBJECT, "run_id": TEXT, "steps": COUNT, "batches": COUNT})
    file.check(state["counts"], dict.fromkeys(KINDS, COUNT), "counts.")
    file = CheckedFile(directory / STATE_FOLDER / "loaders.json")
    loaders = read_state(directory, "loaders")
    count = state["counts"]["loaders"]
    holds = isinstance(loaders, list) and len(loaders) == count
    file.require(holds, "the list", loaders, f"of the {count} loaders")
    for number, loader in enumerate(loaders or []):
        file.check(loader, {"epoch": COUNT, "position": COUNT, "open": BOOL, "complete": BOOL, "seed": WHOLE,
                            "total_batch_size": or_none(COUNT)}, f"[{number}].")  # fmt: skip


def check_counts(saved: dict[str, int], now: dict[str, int], directory: Path) -> None:
    """Check that a checkpoint holds the state of as many objects as are prepared; log what is left out.

    Raises:
        ValueError: If it holds the state of other objects.
    """
    for kind, count in saved.items():
        if kind == "loaders" and count < now[kind]:
            logger.info(
                "%s holds the state of %d loaders: those prepared after them start from the beginning", directory, count
            )
        elif kind != "models" and count and not now[kind]:
            logger.info("the state of %d %s in %s is left out, since none is prepared", count, kind, directory)
        elif count != now[kind]:
            raise ValueError(
                f"{directory} holds the state of {count} {kind}, but {now[kind]} are prepared; prepare() the same "
                "objects in the same order before load_state()"
            )


def check_replaceable(directory: Path) -> None:
    """Check that a folder can be replaced by a rename.

    Raises:
        ValueError: If it is no folder, or the working directory is in it.
    """
    if directory.exists() and not directory.is_dir():
        raise ValueError(f"save_state() cannot write to {directory}, which is a file; give a folder")
    if Path.cwd().is_relative_to(directory.resolve()):
        raise ValueError(
            f"save_state() cannot replace {directory}, since it is the working directory or contains it; give a folder "
            "below it"
        )


def keep_other_files(directory: Path, staging: Path) -> None:
    """Link what is in a folder, but in no checkpoint of it, into the staged checkpoint that replaces it.

    Args:
        directory: The folder; it may be missing.
        staging: Folder of the complete staged checkpoint, on the same disk.
    """
    try:
        known = {*Manifest.read(directory).files, MANIFEST_NAME}
    except CheckpointError:
        known = set()
    for path in sorted(directory.rglob("*")) if directory.is_dir() else ():
        name = path.relative_to(directory)
        target = staging / name
        if name.as_posix() in known or target.exists():
            continue
        if path.is_dir() and not path.is_symlink():
            if not any(other.startswith(f"{name.as_posix()}/") for other in known):
                target.mkdir()
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(path, target, follow_symlinks=False)
        except OSError:  # a disk without links
            shutil.copy2(path, target, follow_symlinks=False)
