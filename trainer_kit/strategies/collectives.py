"""`Collectives`: what processes exchange on the host. This base is for one process; subclasses talk to others."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch

T = TypeVar("T")


class Collectives:
    """The layout of the processes and their collectives; all processes call each in the same order.

    Args:
        rank: Number of this process among all, from 0.
        local_rank: Number of this process on its machine, from 0.
        world_size: Number of processes.
    """

    def __init__(self, rank: int = 0, local_rank: int = 0, world_size: int = 1) -> None:
        self.rank = rank
        self.local_rank = local_rank
        self.world_size = world_size

    @property
    def is_alone(self) -> bool:
        """Whether there are no other processes in the run."""
        return True

    @property
    def is_main(self) -> bool:
        """Whether this process writes logs and checkpoints."""
        return self.rank == 0

    @property
    def is_local_main(self) -> bool:
        """Whether this process is the first on its machine."""
        return self.local_rank == 0

    def all_reduce(self, tensor: torch.Tensor, op: str = "sum") -> torch.Tensor:
        """Return the tensor's sum ("sum") or maximum ("max") over all processes."""
        return tensor

    def all_reduce_ints(self, numbers: Sequence[int]) -> Sequence[int]:
        """Return each of the integers (below 2**63), which lie on the host, summed over all processes."""
        return numbers

    def read_scalars(self, scalars: Sequence[torch.Tensor], summed: bool = False) -> list[float]:
        """Return the values of tensors without dimensions that lie on the device; waits for it once.

        Args:
            scalars: All of one dtype; the same number on all processes where they are summed.
            summed: Sum each over all processes.
        """
        if not scalars:
            return []
        stacked = torch.stack([*scalars])
        values: list[float] = (self.all_reduce(stacked) if summed else stacked).tolist()
        return values

    def unshard(self, outputs: Any) -> Any:
        """Return a model's outputs whole, for the host to read, where several devices hold parts of them."""
        return outputs

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the processes' tensors joined along the first dimension, by rank; lengths may differ."""
        return tensor

    def gather_object(self, value: T) -> list[T]:
        """Return the processes' values, anything that can be pickled, by rank, on all processes."""
        return [value]

    def gather_to_main(self, value: T) -> list[T]:
        """Return the processes' values by rank on the main process; an empty list on the others."""
        return [value]

    def broadcast(self, value: T) -> T:
        """Return the main process's value."""
        return value

    def barrier(self) -> None:
        """Wait until all processes are here."""

    def on_main(self, function: Callable[[], T]) -> T:
        """Call `function` on the main process alone; every process returns its result, or raises its error."""
        return function()

    def check_same_on_all_ranks(self, facts: Mapping[str, Any]) -> None:
        """Compare facts by name, which must be the same on all processes and come in the same order.

        Raises:
            ValueError: Naming the first process that differs from the main one, the fact and both values; where only
                the order differs, the first two names that do.
        """
