"""`Collectives`: the layout of the processes and their collectives. The base class is for one process."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch

from trainer_kit.strategies.vote import Vote

T = TypeVar("T")


class Collectives:
    """The layout of the processes and their collectives, which all processes call in the same order.

    Args:
        rank: Rank of this process among all processes, from 0.
        local_rank: Rank of this process on its machine, from 0.
        world_size: Number of processes.

    Attributes:
        reader_size: Number of consecutive processes that read the same batches and count as one reader of the data; 1
            unless layers are split over processes.
    """

    def __init__(self, rank: int = 0, local_rank: int = 0, world_size: int = 1) -> None:
        self.rank = rank
        self.local_rank = local_rank
        self.world_size = world_size
        self.reader_size = 1

    @property
    def reader(self) -> int:
        """Number of this process's reader, from 0: its share of the data."""
        return self.rank // self.reader_size

    @property
    def readers(self) -> int:
        """Number of readers, over which the data is divided."""
        return self.world_size // self.reader_size

    def once_a_reader(self, values: Sequence[T]) -> list[T]:
        """Return one value of each reader, from the values of all processes by rank."""
        return [*values[:: self.reader_size]]

    @property
    def backend(self) -> str | None:
        """What the processes communicate with, such as "gloo"; None for a single process."""
        return None

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

    def describe_rank(self, rank: int) -> str:
        """Return a rank as text, with its host if there are several machines."""
        return f"rank {rank}"

    def all_reduce(self, tensor: torch.Tensor, op: str = "sum") -> torch.Tensor:
        """Return the elementwise sum ("sum") or maximum ("max") of the tensor over all processes."""
        return tensor

    def sum_over_readers(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the elementwise sum of the tensor over all readers."""
        total = self.all_reduce(tensor)
        if self.reader_size == 1:
            return total
        return torch.div(total, self.reader_size, rounding_mode=None if total.is_floating_point() else "floor")

    def all_reduce_ints(self, numbers: Sequence[int]) -> Sequence[int]:
        """Return each of the host's integers, below 2**63, summed over all processes."""
        return numbers

    def make_vote(self, runs_ahead: bool) -> Vote:
        """Return votes of all processes, to be closed by the caller. Collective.

        Args:
            runs_ahead: Whether a vote should continue while its caller computes, if it can.
        """
        return Vote(self.all_reduce_ints)

    def read_scalars(self, scalars: Sequence[torch.Tensor], summed: bool = False) -> list[float]:
        """Return the values of scalar tensors on the device; waits for the device once.

        Args:
            scalars: Tensors without dimensions, all of one dtype; equally many on all processes if `summed`.
            summed: Whether to sum each over all readers.
        """
        if not scalars:
            return []
        stacked = torch.stack([*scalars])
        values: list[float] = (self.sum_over_readers(stacked) if summed else stacked).tolist()
        return values

    def unshard(self, outputs: Any) -> Any:
        """Return a model's outputs as full tensors that the host can read, if they are sharded over devices."""
        return outputs

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensors of all processes, concatenated by rank along dimension 0; lengths may differ."""
        return tensor

    def gather_object(self, value: T) -> list[T]:
        """Return the values of all processes by rank, on all processes; any picklable object."""
        return [value]

    def gather_to_main(self, value: T) -> list[T]:
        """Return the values of all processes by rank on the main process, and an empty list on the others."""
        return [value]

    def broadcast(self, value: T, source: int = 0) -> T:
        """Return the value of the process with the rank `source`."""
        return value

    def begun(self) -> int:
        """Return how many collectives of torch's process groups this process has begun, the user's included."""
        return 0

    def find_absent(self) -> list[str]:
        """Wait until all processes have reached this call; return where those are that do not come.

        They wait elsewhere for this process, or have left the run.

        Raises:
            LostProcessError: If one of them has failed, or does not answer.
        """
        return []

    def barrier(self) -> None:
        """Wait until all processes have reached this call."""

    @contextlib.contextmanager
    def going_first(self, is_first: bool) -> Iterator[None]:
        """Let the processes for which `is_first` is True run the block before the others. Collective."""
        if not is_first:
            self.barrier()
        try:
            yield
        finally:
            if is_first:
                self.barrier()

    def on_main(self, function: Callable[[], T]) -> T:
        """Call `function` on the main process only, and return its result or raise its error on all processes."""
        return function()

    def check_same_on_all_ranks(self, facts: Mapping[str, Any]) -> None:
        """Check that named facts have the same values and the same order on all processes.

        Raises:
            ValueError: If a process differs from the main one; the message names the first such process, the fact and
                both values, or the first two names if only the order differs.
        """
