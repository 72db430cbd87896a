"""Finding, verifying and reading checkpoints."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import psutil
import torch

from trainer_kit.checkpoint.format.disk import remove_folder
from trainer_kit.checkpoint.format.json_files import inside, read_json
from trainer_kit.checkpoint.format.manifest import (
    ARGUMENTS_NAME,
    CHECKPOINT_PREFIX,
    REPLACED_PREFIX,
    STAGING_PREFIX,
    STATE_FOLDER,
    Manifest,
)
from trainer_kit.checkpoint.format.safetensors_reader import Source, load_source, outline, sources
from trainer_kit.errors import CheckpointError, UnreadableError
from trainer_kit.utils.pytree import unflatten_state

_CLOCK_SLACK = 60.0  # seconds by which the system's clock may have been set since
_STAGING = re.compile(re.escape(STAGING_PREFIX) + r".*-([0-9]+)")


def find_checkpoints(output_dir: Path, prefix: str = CHECKPOINT_PREFIX) -> list[Path]:
    """The folders named `checkpoint-STEP` (or another prefix), whole or not, sorted by step."""
    if not output_dir.is_dir():
        return []
    pattern = re.compile(re.escape(prefix) + r"(0|[1-9][0-9]*)")
    steps = {path: pattern.fullmatch(path.name) for path in output_dir.iterdir() if path.is_dir()}
    found = {path: int(match[1]) for path, match in steps.items() if match}
    return sorted(found, key=lambda path: found[path])


def verify(directory: Path) -> Manifest:
    """Compares every file of a checkpoint with its manifest.

    Raises:
        CheckpointError: Naming the file and what is wrong with it.
    """
    try:
        manifest = Manifest.read(directory)
        manifest.check(directory)
    except OSError as error:
        raise UnreadableError(f"{error.filename or directory} cannot be read: {error.strerror}") from error
    return manifest


def newest_valid(
    output_dir: Path,
    say: Callable[[str], None],
    prefix: str = CHECKPOINT_PREFIX,
    repair: bool = True,
    check: Callable[[Path], object] = verify,
) -> Path | None:
    """The newest checkpoint that is whole, None where there is none.

    Args:
        output_dir: Folder of the run.
        say: Told in one sentence of each newer checkpoint that is passed over, and why.
        prefix: How the folders' names begin, before the number.
        repair: Whether to put back a checkpoint that a killed process had moved aside.
        check: Raises `CheckpointError` for one that is not whole.
    """
    if repair:
        recover_replaced(output_dir)
    return first_valid(reversed(find_checkpoints(output_dir, prefix)), say, check)


def first_valid(
    directories: Iterable[Path], say: Callable[[str], None], check: Callable[[Path], object] = verify
) -> Path | None:
    """The first of these checkpoints that is whole, None where none is.

    Args:
        directories: Each is verified when those before it are not whole.
        say: Told in one sentence of each one that is passed over, and why.
        check: Raises `CheckpointError` for one that is not whole.
    """
    for directory in directories:
        try:
            check(directory)
        except CheckpointError as error:
            say(f"{directory.name} is skipped: {error}")
        else:
            return directory
    return None


def is_of_run(directory: Path, state_name: str, run_id: str) -> bool:
    """Whether a checkpoint is that run's, whose number its state `state_name` holds; a damaged one is nobody's."""
    try:
        state = read_state(directory, state_name)
    except CheckpointError:
        return False
    return isinstance(state, dict) and state.get("run_id") == run_id


def recover_replaced(output_dir: Path) -> None:
    """Puts back a checkpoint that was moved aside for one that was then never committed."""
    if not output_dir.is_dir():
        return
    busy = [path.name for path in at_work(output_dir)]
    for path in output_dir.glob(f"{REPLACED_PREFIX}*"):
        original = path.with_name(path.name.removeprefix(REPLACED_PREFIX))
        is_being_replaced = any(name.startswith(f"{STAGING_PREFIX}{original.name}-") for name in busy)
        if not original.exists() and not is_being_replaced:
            os.rename(path, original)


def remove_stale_staging(output_dir: Path) -> None:
    """Removes what killed processes left half written or half deleted; what a living process works on stays."""
    if not output_dir.is_dir():
        return
    recover_replaced(output_dir)
    found = [path for path in output_dir.iterdir() if path.is_dir() and not path.is_symlink()]
    busy = at_work(output_dir)  # after `found`: what another process begins in between is left alone
    for path in found:
        if (_STAGING.fullmatch(path.name) and path not in busy) or _is_superseded(path):
            remove_folder(path)


def at_work(output_dir: Path) -> list[Path]:
    """What other living processes write or delete in there right now.

    This one is asked while it writes nothing itself: its number is that of a process in an earlier container.
    """
    found = {path: _STAGING.fullmatch(path.name) for path in output_dir.iterdir() if path.is_dir()}
    return [path for path, match in found.items() if match and _is_at_work(int(match[1]), path)]


def _is_at_work(pid: int, staging: Path) -> bool:
    """Whether the process that made the folder lives: one that is younger than the folder only has the same number."""
    if pid == os.getpid():
        return False
    try:
        process, changed = psutil.Process(pid), staging.stat().st_mtime
        # One that is dead keeps its number until its parent has waited for it.
        return process.status() != psutil.STATUS_ZOMBIE and process.create_time() < changed + _CLOCK_SLACK
    except (psutil.NoSuchProcess, FileNotFoundError):  # or the folder has just got its name
        return False
    except psutil.AccessDenied:
        return True


def _is_superseded(path: Path) -> bool:
    """Whether this was moved aside for a checkpoint that is now there."""
    if not path.name.startswith(REPLACED_PREFIX):
        return False
    try:
        Manifest.read(path.with_name(path.name.removeprefix(REPLACED_PREFIX)))
    except CheckpointError:
        return False
    return True


def read_state(directory: Path, name: str) -> Any | None:
    """The state that `write_checkpoint` got under `name`; None where the checkpoint has no such state.

    Sizes and checksums are not compared: `newest_valid` and `verify` do that.

    Raises:
        CheckpointError: If the manifest or the state's files are missing or damaged.
    """
    return _read_state(directory, name, load_source)


def read_outline(directory: Path, name: str) -> Any | None:
    """The same state with tensors on the device "meta", and such in place of numpy arrays: no values are read.

    Raises:
        CheckpointError: As `read_state` does.
    """
    return _read_state(directory, name, outline)


def _read_state(directory: Path, name: str, load: Callable[[Source], dict[str, torch.Tensor]]) -> Any | None:
    listed = Manifest.read(directory).files
    stem = f"{STATE_FOLDER}/{name}"
    path = inside(directory, f"{stem}.json")
    if f"{stem}.json" not in listed:
        return None
    tree = read_json(path)
    tensors: dict[str, torch.Tensor] = {}
    if any(f"{stem}.safetensors{suffix}" in listed for suffix in ("", ".index.json")):
        for source in sources(directory, stem, listed):
            tensors.update(load(source))
    try:
        return unflatten_state(tree, tensors)
    except ValueError as error:
        raise CheckpointError(f"{path} does not fit its tensors: {error}") from error


def read_arguments(directory: Path) -> dict[str, Any]:
    """The arguments of the run that wrote the checkpoint; sizes and checksums are not compared, as in `read_state`.

    Raises:
        CheckpointError: If the manifest or the file is missing or damaged.
    """
    path = inside(directory, ARGUMENTS_NAME)
    if ARGUMENTS_NAME not in Manifest.read(directory).files:
        raise CheckpointError(f"{directory} holds no arguments: its manifest does not list {ARGUMENTS_NAME}")
    try:
        arguments = unflatten_state(read_json(path), {})
    except CheckpointError:
        raise
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error
    if not isinstance(arguments, dict):
        raise CheckpointError(f"{path} is damaged: it holds no arguments")
    return arguments
