"""Discovery, verification and reading of checkpoints."""

from __future__ import annotations

import functools
import operator
import os
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from trainer_kit.checkpoint.format.base_reference import BaseReference
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
from trainer_kit.checkpoint.format.safetensors_reader import (
    Source,
    load_parts,
    load_source,
    outline,
    sources,
)
from trainer_kit.errors import CheckpointError, UnreadableError
from trainer_kit.utils.box import Part, Placement
from trainer_kit.utils.pytree import tensor_names, unflatten_state

_Load = Callable[[Source], dict[str, torch.Tensor]]

_CLOCK_SLACK = 60.0  # seconds by which the system's clock may have been adjusted
_STAGING = re.escape(STAGING_PREFIX) + r".*-([0-9]+)"


def find_checkpoints(output_dir: Path, prefix: str = CHECKPOINT_PREFIX) -> list[Path]:
    """Return the folders named `checkpoint-STEP` (or with another prefix), valid or not, sorted by step."""
    if not output_dir.is_dir():
        return []
    pattern = re.compile(re.escape(prefix) + r"(0|[1-9][0-9]*)")
    steps = {path: pattern.fullmatch(path.name) for path in output_dir.iterdir() if path.is_dir()}
    found = {path: int(match[1]) for path, match in steps.items() if match}
    return sorted(found, key=lambda path: found[path])


def verify(directory: Path) -> Manifest:
    """Compare each file of a checkpoint with its manifest, and return the manifest.

    The frozen weights that a checkpoint of adapters refers to are compared too.

    Raises:
        CheckpointError: If a file or the manifest is missing, damaged or unreadable; the message names it.
    """
    manifest = verify_files(directory)
    if (base := BaseReference.read(directory)) is not None:
        base.verify(directory)
    return manifest


def verify_files(directory: Path) -> Manifest:
    """Compare each file in a checkpoint with its manifest, and return the manifest.

    A model may have the frozen weights that a checkpoint of adapters refers to: loading needs, and compares, only those
    that it lacks.

    Raises:
        CheckpointError: If a file, the manifest or the reference is missing, damaged or unreadable.
    """
    try:
        manifest = Manifest.read(directory)
        manifest.check(directory)
        BaseReference.read(directory)
    except OSError as error:
        raise UnreadableError(f"{error.filename or directory} cannot be read: {error.strerror}") from error
    return manifest


def newest_valid(
    output_dir: Path,
    say: Callable[[str], None],
    prefix: str = CHECKPOINT_PREFIX,
    repair: bool = True,
    check: Callable[[Path], object] = verify_files,
) -> Path | None:
    """Return the newest valid checkpoint; None if there is none.

    Args:
        output_dir: Folder of the run.
        say: Called with one sentence for each newer checkpoint that is skipped.
        prefix: Prefix of the folders' names, before the step.
        repair: Whether to restore a checkpoint that a killed process moved aside.
        check: Raises `CheckpointError` for an invalid checkpoint.
    """
    if repair:
        recover_replaced(output_dir)
    return first_valid(reversed(find_checkpoints(output_dir, prefix)), say, check)


def first_valid(
    directories: Iterable[Path], say: Callable[[str], None], check: Callable[[Path], object] = verify_files
) -> Path | None:
    """Return the first valid one of these checkpoints; None if there is none.

    Args:
        directories: The checkpoints, checked in order until one is valid.
        say: Called with one sentence for each checkpoint that is skipped.
        check: Raises `CheckpointError` for an invalid checkpoint.
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
    """Return whether the state `state_name` of a checkpoint holds this run ID; False for a damaged checkpoint."""
    try:
        state = read_state(directory, state_name)
    except CheckpointError:
        return False
    return isinstance(state, dict) and state.get("run_id") == run_id


def recover_replaced(output_dir: Path) -> None:
    """Restore checkpoints that were moved aside for a replacement that was never committed."""
    if not output_dir.is_dir():
        return
    busy = [path.name for path in at_work(output_dir)]
    for path in output_dir.glob(f"{REPLACED_PREFIX}*"):
        original = path.with_name(path.name.removeprefix(REPLACED_PREFIX))
        is_being_replaced = any(name.startswith(f"{STAGING_PREFIX}{original.name}-") for name in busy)
        if not original.exists() and not is_being_replaced:
            os.rename(path, original)


def remove_stale_staging(output_dir: Path) -> None:
    """Remove folders that killed processes left incomplete; folders of living processes stay."""
    if not output_dir.is_dir():
        return
    recover_replaced(output_dir)
    found = [path for path in output_dir.iterdir() if path.is_dir() and not path.is_symlink()]
    busy = at_work(output_dir)  # after `found`, so that folders created in between stay
    for path in found:
        if (re.fullmatch(_STAGING, path.name) and path not in busy) or _is_superseded(path):
            remove_folder(path)


def at_work(output_dir: Path) -> list[Path]:
    """Return the staging folders that other living processes write or delete now.

    This process must not be writing: a folder with its PID counts as left by an earlier container.
    """
    found = {path: re.fullmatch(_STAGING, path.name) for path in output_dir.iterdir() if path.is_dir()}
    return [path for path, match in found.items() if match and _is_at_work(int(match[1]), path)]


def _is_at_work(pid: int, staging: Path) -> bool:
    """Return whether the process that created the folder lives; a younger process has only the same PID."""
    if pid == os.getpid():
        return False
    import psutil  # takes 6 ms

    try:
        process, changed = psutil.Process(pid), staging.stat().st_mtime
        # A dead process keeps its PID until its parent has waited for it.
        return process.status() != psutil.STATUS_ZOMBIE and process.create_time() < changed + _CLOCK_SLACK
    except (psutil.NoSuchProcess, FileNotFoundError):  # the folder may just have been renamed
        return False
    except psutil.AccessDenied:
        return True


def _is_superseded(path: Path) -> bool:
    """Return whether this folder was moved aside for a checkpoint that now exists."""
    if not path.name.startswith(REPLACED_PREFIX):
        return False
    try:
        Manifest.read(path.with_name(path.name.removeprefix(REPLACED_PREFIX)))
    except CheckpointError:
        return False
    return True


def read_state(directory: Path, name: str) -> Any | None:
    """Return the state that was saved under `name`; None if the checkpoint has no such state.

    Sizes and checksums are not compared: `newest_valid` and `verify` do that.

    Args:
        directory: Folder of the checkpoint.
        name: Name of the state.

    Raises:
        CheckpointError: If the manifest or the state's files are missing or damaged.
    """
    return _read_state(directory, name, lambda tree: load_source)


def read_outline(directory: Path, name: str) -> Any | None:
    """Return a state as `read_state` does, but with "meta" tensors for tensors and numpy arrays, without their values.

    Raises:
        CheckpointError: If the manifest or the state's files are missing or damaged.
    """
    return _read_state(directory, name, lambda tree: outline)


def read_state_into(
    directory: Path, name: str, targets: Mapping[tuple[Any, ...], torch.Tensor], placement: Placement
) -> Any | None:
    """Return a state as `read_state` does, with `targets` in place of tensors of which this process holds a part.

    Args:
        directory: Folder of the checkpoint.
        name: Name of the state.
        targets: Tensors of the saved shapes by their place in the state, such as ("state", 0, "exp_avg").
        placement: Returns the part of a target that this process holds; only its bytes are read, into it.

    Raises:
        CheckpointError: If the manifest or the state's files are missing or damaged.
    """

    def loader(tree: Any) -> _Load:
        parts = {tensor: _part(targets[place], placement) for place, tensor in tensor_names(tree) if place in targets}

        def load(source: Source) -> dict[str, torch.Tensor]:
            here = {tensor: part for tensor, part in parts.items() if tensor in source.shapes}
            load_parts(source, here)
            return outline(source) | load_source(source, names=source.shapes.keys() - here.keys())

        return load

    state: Any = _read_state(directory, name, loader)
    for (*places, last), target in targets.items():
        functools.reduce(operator.getitem, places, state)[last] = target
    return state


def _part(target: torch.Tensor, placement: Placement) -> Part:
    part = placement(target)
    assert part is not None, "this process holds all of the target"
    return part


def state_names(directory: Path) -> set[str]:
    """Return the names of the states in a checkpoint."""
    prefix, suffix = f"{STATE_FOLDER}/", ".json"
    names = {each[len(prefix) :] for each in Manifest.read(directory).files if each.startswith(prefix)}
    return {each[: -len(suffix)] for each in names if each.endswith(suffix) and ".safetensors." not in each}


def _read_state(directory: Path, name: str, loader: Callable[[Any], _Load]) -> Any | None:
    """Read a state; `loader` takes its JSON tree and returns the function that loads each file."""
    listed = Manifest.read(directory).files
    stem = f"{STATE_FOLDER}/{name}"
    path = inside(directory, f"{stem}.json")
    if f"{stem}.json" not in listed:
        return None
    tree = read_json(path)
    tensors: dict[str, torch.Tensor] = {}
    if any(f"{stem}.safetensors{suffix}" in listed for suffix in ("", ".index.json")):
        load = loader(tree)
        for source in sources(directory, stem, listed):
            tensors.update(load(source))
    try:
        return unflatten_state(tree, tensors)
    except ValueError as error:
        raise CheckpointError(f"{path} does not fit its tensors: {error}") from error


def read_arguments(directory: Path) -> dict[str, Any]:
    """Return the arguments of the run that wrote the checkpoint; sizes and checksums are not compared.

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


def is_of_transformers(directory: Path) -> bool:
    """Return whether transformers' Trainer wrote this checkpoint."""
    return (directory / "trainer_state.json").is_file()
