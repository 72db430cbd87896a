"""Ownership: which of several processes writes which tensor of a checkpoint, into which file."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import PurePosixPath
from typing import NamedTuple

import torch
import xxhash

from trainer_kit.checkpoint.format.safetensors_writer import Shard, plan_shards, untie

PART_BYTES = 2**25
"""Bytes from which on a part of a checkpoint is worth a writer and a file of its own."""


class Division(NamedTuple):
    """Plan of the files that several processes write together.

    Attributes:
        shards: Files in order, by the stem of each group ("model", "state/optimizer").
        digest: Checksum of the files with the tensors' dtypes and whole shapes. Processes with equal digests write
            files that fit together.
    """

    shards: Mapping[str, Sequence[Shard]]
    digest: str

    @property
    def writers(self) -> int:
        """Number of processes that write."""
        return 1 + max((shard.writer for shards in self.shards.values() for shard in shards), default=0)


def divide(
    groups: Mapping[str, Mapping[str, torch.Tensor]],
    writers: int,
    max_shard_size: int | str,
    is_pinned: Callable[[str, torch.Tensor], bool] = lambda stem, tensor: False,
    in_one_file: Collection[str] = (),
) -> Division:
    """Divide groups of tensors among writers.

    The result depends on names, ties, dtypes and whole shapes alone, so that all processes with the same tensors
    compute the same one without communication.

    Args:
        groups: Tensors by name, by the stem of their files.
        writers: Number of processes that can write to the folder.
        max_shard_size: Largest size of a file's tensors, in bytes or as "300MB"; a larger tensor gets its own file.
        is_pinned: Returns whether writer 0 must write a tensor of a group.
        in_one_file: Stems of the groups that writer 0 writes into one file each, of any size.

    Raises:
        ValueError: If `max_shard_size` is invalid.
    """
    ties = [untie(tensors) for tensors in groups.values()]
    sizes = [
        {name: tensors[name].nbytes for name in aliases} for tensors, aliases in zip(groups.values(), ties, strict=True)
    ]
    free = [
        {name: size for name, size in each.items() if stem not in in_one_file and not is_pinned(stem, tensors[name])}
        for (stem, tensors), each in zip(groups.items(), sizes, strict=True)
    ]
    owners = [
        dict.fromkeys(each, 0) | assigned for each, assigned in zip(sizes, assign_writers(free, writers), strict=True)
    ]
    shards = {
        stem: plan_shards(
            tensors, aliases, PurePosixPath(stem).name, sys.maxsize if stem in in_one_file else max_shard_size, owner
        )
        for (stem, tensors), aliases, owner in zip(groups.items(), ties, owners, strict=True)
    }
    lines = [
        (stem, shard.file, shard.writer, name, others, tuple(groups[stem][name].shape), groups[stem][name].dtype)
        for stem, planned in shards.items()
        for shard in planned
        for name, others in shard.aliases.items()
    ]
    return Division(shards, xxhash.xxh3_64_hexdigest(repr(lines).encode()))


def assign_writers(groups: Sequence[Mapping[str, int]], writers: int) -> list[dict[str, int]]:
    """Assign each tensor to one writer, so that all write about as many bytes.

    The largest tensor comes first and goes to the writer with the fewest bytes so far; ties go by name.

    Args:
        groups: Size in bytes of each tensor by name, for each group of files.
        writers: Number of processes that can write to the folder.

    Returns:
        Number of the writer of each tensor, from 0, for each group. Small checkpoints have fewer writers.
    """
    total = sum(size for group in groups for size in group.values())
    loads = [0] * min(writers, max(1, total // PART_BYTES))
    owners: list[dict[str, int]] = [{} for _ in groups]
    tensors = [(-size, number, name) for number, group in enumerate(groups) for name, size in group.items()]
    for size, number, name in sorted(tensors):
        owners[number][name] = writer = loads.index(min(loads))
        loads[writer] -= size
    return owners
