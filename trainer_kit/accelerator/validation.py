"""Checks of the objects that an `Accelerator` saves, and of the checkpoints that it loads or replaces."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from trainer_kit.checkpoint import CheckpointError, read_state
from trainer_kit.checkpoint.format.commit import staging_folder
from trainer_kit.checkpoint.format.discovery import verify_files
from trainer_kit.checkpoint.format.disk import flush_file, fsync_directory, make_run_folder, remove_folder
from trainer_kit.checkpoint.format.manifest import MANIFEST_NAME, STATE_FOLDER, Manifest
from trainer_kit.checkpoint.format.trainer_state import BOOL, COUNT, OBJECT, TEXT, WHOLE, CheckedFile, or_none

logger = logging.getLogger("trainer_kit")

KINDS = ("models", "optimizers", "schedulers", "loaders")
"""Kinds of prepared objects that a checkpoint counts."""


def is_stateful(thing: Any) -> bool:
    """Return whether an object, not a class, has `state_dict` and `load_state_dict`."""
    return not isinstance(thing, type) and hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")


def check_state(directory: Path, check_files: Callable[[Path], object] = verify_files) -> None:
    """Verify a checkpoint and the saved state of the loop; leave a checkpoint of another program to `load_state`.

    Args:
        directory: Folder of the checkpoint.
        check_files: Raises `CheckpointError` for a damaged file.

    Raises:
        CheckpointError: If a file is damaged, or a value is invalid for a loop.
    """
    check_files(directory)
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
    if directory.is_dir():
        link_files(directory, staging, known)


def open_hook_folder(target: Path) -> Path:
    """Create a folder on the disk of a checkpoint, with the checkpoint's name, into which hooks write its files.

    The folder that contains it is temporary, and found as stale if its process is killed.
    """
    container = staging_folder(target.with_name(f"hooks-{target.name}"))
    make_run_folder(target.parent)
    remove_folder(container)  # of an earlier process with the same PID
    folder = container / target.name
    folder.mkdir(parents=True)
    return folder


def link_files(directory: Path, staging: Path, known: Collection[str] = (), is_flushed: bool = True) -> None:
    """Link the files of a folder into the staged checkpoint, where it has none of that name.

    Args:
        directory: The folder.
        staging: Folder of the complete staged checkpoint, on the same disk.
        known: Relative paths to leave out.
        is_flushed: Whether the files are on the disk already; others are flushed.
    """
    for path in sorted(directory.rglob("*")):
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
        if not is_flushed and target.is_file():
            flush_file(target)
    if not is_flushed:
        for folder in {staging, *(path.parent for path in staging.rglob("*"))}:
            fsync_directory(folder)


def numbered(name: str, objects: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    """Yield the objects with names: model, model_1, model_2 and so on."""
    return ((f"{name}_{number}" if number else name, each) for number, each in enumerate(objects))


def kept_by_hooks(name: str, before: Sequence[Any], after: Sequence[Any]) -> dict[str, Any]:
    """Return the objects that hooks have left in a list, by the names that they had; a full list counts by position.

    Raises:
        ValueError: If a hook has both removed and replaced objects.
    """
    if len(after) == len(before):
        return dict(numbered(name, after))
    names = {id(each): known for known, each in numbered(name, before)}
    if any(id(each) not in names for each in after):
        raise ValueError(
            f"a hook has left {len(after)} of {len(before)} {name}s in its list, and replaced some of them; it may "
            "remove elements or replace them, not both"
        )
    return {names[id(each)]: each for each in after}
