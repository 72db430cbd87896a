"""Ownership: which of several processes writes which tensor of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

PART_BYTES = 2**25
"""Bytes from which on a part of a checkpoint is worth a writer and a file of its own."""


def assign_writers(groups: Sequence[Mapping[str, int]], writers: int) -> list[dict[str, int]]:
    """Assign each tensor to one writer, so that all write about as many bytes.

    The result depends on the arguments alone, so that all processes compute the same one without communication.
    The largest tensor comes first and goes to the writer with the fewest bytes so far.

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
