"""`Snapshot`: the content of a checkpoint at one step, which can be written while training continues."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any, NamedTuple

import torch

from trainer_kit.checkpoint.format.manifest import ARGUMENTS_NAME, MANIFEST_NAME, STATE_FOLDER
from trainer_kit.checkpoint.format.model_values import split_values, values_name
from trainer_kit.checkpoint.format.ownership import Division, divide
from trainer_kit.checkpoint.format.safetensors_writer import (
    Shard,
    is_file_of,
    plan_shards,
    refuse_unstorable,
    storage_key,
    untie,
)
from trainer_kit.utils.pytree import flatten_state

Tensors = Mapping[str, torch.Tensor]
Copy = Callable[[list[torch.Tensor]], list[torch.Tensor]]

_NAME = r"[A-Za-z0-9_][A-Za-z0-9._-]*"
_SHARD_NAME = r"(?i)\.safetensors|-\d{5}-of-\d{5}"


class Snapshot(NamedTuple):
    """Content of a checkpoint, for `write_checkpoint`.

    Attributes:
        step: Number of optimizer steps taken.
        world_size: Number of processes of the run.
        model: The model's tensors by name; None for a checkpoint without it.
        states: JSON tree and tensors of each state by name, from `trainer_kit.utils.pytree.flatten_state`.
        arguments: The arguments of the run, as a JSON tree.
        files: Contents of further files (config.json, a tokenizer's) by path in the checkpoint.
        more_models: Tensors of further models, by prefix of their files' names.
        adapters: Tensors of adapters, by the stem of the one file that each has.
        division: Files that several processes write together; None: one process writes everything.
        writer: Number of this process among the writers; 0 also writes what is not divided.
    """

    step: int
    world_size: int
    model: Tensors | None
    states: Mapping[str, tuple[Any, Tensors]]
    arguments: Any
    files: Mapping[str, bytes]
    more_models: Mapping[str, Tensors]
    adapters: Mapping[str, Tensors]
    division: Division | None = None
    writer: int = 0

    @property
    def groups(self) -> dict[str, Tensors]:
        """Tensors of each group of files, by its stem in the checkpoint: "model", "state/optimizer"."""
        of_states = {f"{STATE_FOLDER}/{name}": tensors for name, (_, tensors) in self.states.items() if tensors}
        of_model = {} if self.model is None or (self.adapters and not self.model) else {"model": self.model}
        return {**of_model, **self.more_models, **self.adapters, **of_states}

    @property
    def nbytes(self) -> int:
        """Size of all tensors in bytes, counting tied ones once."""
        return sum(tensor.nbytes for tensor in _distinct(self.groups.values()).values())

    @property
    def own_nbytes(self) -> int:
        """Size in bytes of the tensors that this process writes, counting tied ones once."""
        own = [self._own(stem, tensors) for stem, tensors in self.groups.items()]
        return sum(tensor.nbytes for tensor in _distinct(own).values())

    def divide(
        self,
        shared: Collection[str],
        writers: int,
        max_shard_size: int | str,
        is_pinned: Callable[[str, torch.Tensor], bool] = lambda name, tensor: False,
    ) -> Division:
        """Return how several processes can write the models and some states together.

        Args:
            shared: Names of the states that all processes have, in addition to the models.
            writers: Number of the processes.
            max_shard_size: See `write_checkpoint`.
            is_pinned: Returns whether writer 0 must write a tensor of a state, which has this name.

        Raises:
            ValueError: If `max_shard_size` is invalid.
        """
        together = {"model", *self.more_models, *self.adapters, *(f"{STATE_FOLDER}/{name}" for name in shared)}
        return divide(
            {stem: tensors for stem, tensors in self.groups.items() if stem in together},
            writers,
            max_shard_size,
            lambda stem, tensor: stem not in self.adapters and is_pinned(PurePosixPath(stem).name, tensor),
            in_one_file=self.adapters,
        )

    def shards(self, stem: str, max_shard_size: int | str) -> Sequence[Shard]:
        """Return the files of a group of tensors.

        Raises:
            ValueError: If `max_shard_size` is invalid.
        """
        if self.division is not None and stem in self.division.shards:
            return self.division.shards[stem]
        tensors = self.groups[stem]
        max_shard_size = sys.maxsize if stem in self.adapters else max_shard_size
        return plan_shards(tensors, untie(tensors), PurePosixPath(stem).name, max_shard_size)

    def stored(self) -> Iterator[tuple[torch.Tensor, int]]:
        """Yield the divided tensors and the numbers of their writers, in the same order on all processes."""
        for stem, shards in self.division.shards.items() if self.division is not None else ():
            for shard in shards:
                for name in shard.aliases:
                    yield self.groups[stem][name], shard.writer

    def copied(self, copy: Copy) -> Snapshot:
        """Return this snapshot with copies of the tensors that this process writes.

        Args:
            copy: Takes the tensors, tied ones once, and returns copies in the same order.
        """
        own = [self._own(stem, tensors) for stem, tensors in self.groups.items()]
        distinct = _distinct(own)
        copies = dict(zip(distinct, copy(list(distinct.values())), strict=True))

        def copied(tensors: Tensors) -> Tensors:
            return {name: copies.get(storage_key(tensor), tensor) for name, tensor in tensors.items()}

        return self._replace(
            model=None if self.model is None else copied(self.model),
            states={name: (tree, copied(tensors)) for name, (tree, tensors) in self.states.items()},
            more_models={name: copied(tensors) for name, tensors in self.more_models.items()},
            adapters={name: copied(tensors) for name, tensors in self.adapters.items()},
        )

    def _own(self, stem: str, tensors: Tensors) -> Tensors:
        """Return the tensors of a group that this process stores."""
        if self.division is None or stem not in self.division.shards:
            return tensors if self.writer == 0 else {}
        own = [shard.aliases for shard in self.division.shards[stem] if shard.writer == self.writer]
        return {name: tensors[name] for aliases in own for name in aliases}


def take_snapshot(
    step: int,
    model_state: Mapping[str, Any] | None,
    states: Mapping[str, Any],
    *,
    arguments: Mapping[str, Any],
    world_size: int = 1,
    files: Mapping[str, bytes] | None = None,
    more_models: Mapping[str, Mapping[str, Any]] | None = None,
    adapters: Mapping[str, Tensors] | None = None,
) -> Snapshot:
    """Collect the content of a checkpoint, and check that a checkpoint can hold it.

    Args:
        step: Number of optimizer steps taken.
        model_state: The model's `state_dict`, on any device; None for a checkpoint without it. Values that are no
            tensors become a state, see `values_name`.
        states: Trees that `trainer_kit.utils.pytree.flatten_state` accepts, by a name of letters, digits and `._-`.
        arguments: The arguments of the run.
        world_size: Number of processes of the run.
        files: Contents of further files by path in the checkpoint; None: none.
        more_models: The same of further models, by prefix of their files' names; None: none.
        adapters: Tensors of adapters, by the stem of the one file that each has; None: none.

    Returns:
        The snapshot. It refers to the tensors themselves (see `Snapshot.copied`), and shares nothing else with the
        states, which may change afterwards.

    Raises:
        ValueError: If `step` is negative, a name is invalid, a file has a name that the checkpoint uses itself, or a
            tensor has no content (device "meta").
        TypeError: If a state or the arguments hold a value that a checkpoint cannot hold; the message names its place.
    """
    if step < 0:
        raise ValueError(f"step={step} is negative; steps count from 0")
    models, values = _split_models({"model": model_state or {}, **(more_models or {})})
    states = {**states, **values}
    _check_names("state", states)
    _check_names("model", models)
    adapters = adapters or {}
    _check_names("adapter", [part for stem in adapters for part in PurePosixPath(stem).parts])
    for tensors in (*models.values(), *adapters.values()):
        _refuse_unstorable(tensors)
    taken = {name: _take_state(name, state) for name, state in states.items()}
    tree, tensors_of_arguments = flatten_state(dict(arguments))
    if tensors_of_arguments:
        place = next(iter(tensors_of_arguments))
        raise TypeError(f"the arguments hold a tensor or an array ({place}); give a number or a list")
    _check_files(files or (), [*models, *adapters])
    return Snapshot(
        step=step,
        world_size=world_size,
        model=None if model_state is None else models["model"],
        states=taken,
        arguments=tree,
        files=dict(files or {}),
        more_models={stem: models[stem] for stem in more_models or {}},
        adapters=adapters,
    )


def _split_models(models: Mapping[str, Mapping[str, Any]]) -> tuple[dict[str, Tensors], dict[str, Any]]:
    """Return the tensors of models by stem, and their values that are no tensors as states by name."""
    parts = {stem: split_values(state) for stem, state in models.items()}
    values = {values_name(stem): values for stem, (_, values) in parts.items() if values}
    return {stem: tensors for stem, (tensors, _) in parts.items()}, values


def _check_files(names: Iterable[str], stems: Iterable[str]) -> None:
    for name in names:
        is_shard = any(is_file_of(name, stem) for stem in stems)
        if is_shard or name in (MANIFEST_NAME, ARGUMENTS_NAME) or name.partition("/")[0] == STATE_FOLDER:
            raise ValueError(f"the model or its processor writes a file {name!r}, which is a checkpoint's own")


def _check_names(what: str, names: Iterable[str]) -> None:
    taken: dict[str, str] = {}
    for name in names:
        if not re.fullmatch(_NAME, name) or re.search(_SHARD_NAME, name):
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
