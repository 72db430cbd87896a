"""`Snapshot`: the content of a checkpoint at one step, which can be written while training continues."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from trainer_kit.checkpoint.format.manifest import ARGUMENTS_NAME, MANIFEST_NAME, STATE_FOLDER
from trainer_kit.checkpoint.format.safetensors_writer import is_file_of, refuse_unstorable, storage_key
from trainer_kit.utils.pytree import flatten_state

Tensors = Mapping[str, torch.Tensor]
Copy = Callable[[list[torch.Tensor]], list[torch.Tensor]]

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")
_SHARD_NAME = re.compile(r"\.safetensors|-\d{5}-of-\d{5}", re.IGNORECASE)


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """Content of a checkpoint, for `write_checkpoint`.

    Attributes:
        step: Number of optimizer steps taken.
        world_size: Number of processes of the run.
        model: The model's tensors by name.
        states: JSON tree and tensors of each state by name, from `trainer_kit.utils.pytree.flatten_state`.
        arguments: The arguments of the run, as a JSON tree.
        files: Contents of further files (config.json, a tokenizer's) by path in the checkpoint.
        more_models: Tensors of further models, by prefix of their files' names.
    """

    step: int
    world_size: int
    model: Tensors
    states: Mapping[str, tuple[Any, Tensors]]
    arguments: Any
    files: Mapping[str, bytes]
    more_models: Mapping[str, Tensors] = dataclasses.field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Size of all tensors in bytes, counting tied ones once."""
        groups = [self.model, *self.more_models.values(), *(tensors for _, tensors in self.states.values())]
        return sum(tensor.nbytes for tensor in _distinct(groups).values())


def take_snapshot(
    step: int,
    model_state: Tensors,
    states: Mapping[str, Any],
    *,
    arguments: Mapping[str, Any],
    world_size: int = 1,
    files: Mapping[str, bytes] | None = None,
    more_models: Mapping[str, Tensors] | None = None,
    copy: Copy | None = None,
) -> Snapshot:
    """Collect the content of a checkpoint, and check that a checkpoint can hold it.

    Args:
        step: Number of optimizer steps taken.
        model_state: The model's tensors by name, on any device.
        states: Trees that `trainer_kit.utils.pytree.flatten_state` accepts, by a name of letters, digits and `._-`.
        arguments: The arguments of the run.
        world_size: Number of processes of the run.
        files: Contents of further files by path in the checkpoint; None: none.
        more_models: Tensors of further models, by prefix of their files' names; None: none.
        copy: Takes all tensors, tied ones once, and returns host copies in the same order. None: the snapshot refers
            to the tensors themselves, which must not change until it is written.

    Returns:
        The snapshot. Except for the tensors, it shares nothing with the states, which may change afterwards.

    Raises:
        ValueError: If `step` is negative, a name is invalid, a file has a name that the checkpoint uses itself, or a
            tensor has no content (device "meta").
        TypeError: If a state or the arguments hold a value that a checkpoint cannot hold; the message names its place.
    """
    if step < 0:
        raise ValueError(f"step={step} is negative; steps count from 0")
    more_models = more_models or {}
    _check_names("state", states)
    stems = ["model", *more_models]
    _check_names("model", stems)
    for tensors in (model_state, *more_models.values()):
        _refuse_unstorable(tensors)
    taken = {name: _take_state(name, state) for name, state in states.items()}
    tree, tensors_of_arguments = flatten_state(dict(arguments))
    if tensors_of_arguments:
        place = next(iter(tensors_of_arguments))
        raise TypeError(f"the arguments hold a tensor or an array ({place}); give a number or a list")
    _check_files(files or (), stems)
    groups = [model_state, *more_models.values(), *(tensors for _, tensors in taken.values())]
    model, *others = groups if copy is None else _copied(groups, copy)
    of_states = others[len(more_models) :]
    return Snapshot(
        step=step,
        world_size=world_size,
        model=model,
        states={name: (tree, own) for (name, (tree, _)), own in zip(taken.items(), of_states, strict=True)},
        arguments=tree,
        files=dict(files or {}),
        more_models=dict(zip(more_models, others, strict=False)),
    )


def _check_files(names: Iterable[str], stems: Iterable[str]) -> None:
    for name in names:
        is_shard = any(is_file_of(name, stem) for stem in stems)
        if is_shard or name in (MANIFEST_NAME, ARGUMENTS_NAME) or name.partition("/")[0] == STATE_FOLDER:
            raise ValueError(f"the model or its processor writes a file {name!r}, which is a checkpoint's own")


def _check_names(what: str, names: Iterable[str]) -> None:
    taken: dict[str, str] = {}
    for name in names:
        if not _NAME.fullmatch(name) or _SHARD_NAME.search(name):
            raise ValueError(
                f"a {what} is named {name!r}, which cannot be a file's name; use letters, digits and '._-', "
                "beginning with a letter or digit, without '.safetensors' or '-00001-of-00002'"
            )
        other = taken.setdefault(name.lower(), name)
        if other != name:
            raise ValueError(f"the {what}s {other!r} and {name!r} differ only in case, as files must not; rename one")


def _take_state(name: str, state: Any) -> tuple[Any, Tensors]:
    try:
        tree, tensors = flatten_state(state)
        _refuse_unstorable(tensors)
    except (TypeError, ValueError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(f"the state {name!r} cannot be saved: {error}") from error
    return tree, tensors


def _refuse_unstorable(tensors: Tensors) -> None:
    for name, tensor in tensors.items():
        refuse_unstorable(name, tensor)


def _distinct(groups: Iterable[Tensors]) -> dict[tuple[Any, ...], torch.Tensor]:
    return {storage_key(tensor): tensor for tensors in groups for tensor in tensors.values()}


def _copied(groups: list[Tensors], copy: Copy) -> list[Tensors]:
    """Return the groups with copied tensors; tied tensors stay tied, also across groups."""
    distinct = _distinct(groups)
    copies = dict(zip(distinct, copy(list(distinct.values())), strict=True))
    return [{name: copies[storage_key(tensor)] for name, tensor in tensors.items()} for tensors in groups]
