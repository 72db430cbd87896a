"""`XLACollectives`: collectives of hosts that run in lockstep, as one process to the loop."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any, TypeVar

import torch

from trainer_kit.strategies.process_collectives import ProcessCollectives
from trainer_kit.strategies.process_group import ProcessGroup
from trainer_kit.strategies.vote import Vote
from trainer_kit.strategies.xla.mesh import Division
from trainer_kit.utils.pytree import map_tensors

T = TypeVar("T")


class XLACollectives(ProcessCollectives):
    """Collectives in which each host is rank 0 of 1 and reads whole batches; only host 0 writes.

    Args:
        group: The process group of the hosts.

    Attributes:
        division: Sharding of tensors over the devices; None with one device.
    """

    def __init__(self, group: ProcessGroup) -> None:
        super().__init__(group)
        self.rank, self.local_rank, self.world_size = 0, 0, 1
        self.division: Division | None = None

    @property
    def is_main(self) -> bool:
        return self.group.place.rank == 0

    def all_reduce(self, tensor: torch.Tensor, op: str = "sum") -> torch.Tensor:
        return tensor  # SPMD computes over all devices

    def all_reduce_ints(self, numbers: Sequence[int]) -> Sequence[int]:
        # Counts agree on all hosts; a request may come from one host.
        return numbers if self.is_alone else [max(column) for column in zip(*self._gathered([*numbers]), strict=True)]

    def make_vote(self, runs_ahead: bool) -> Vote:
        return Vote(self.all_reduce_ints)  # the hosts run in lockstep

    def read_scalars(self, scalars: Sequence[torch.Tensor], summed: bool = False) -> list[float]:
        # Not stacked, which would compile one more graph for each number of scalars.
        return [scalar.item() for scalar in importlib.import_module("torch_xla")._XLAC._xla_get_cpu_tensors([*scalars])]

    def unshard(self, outputs: Any) -> Any:
        return outputs if self.division is None else map_tensors(self.division.mark_whole, outputs)

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the full tensor on each device: reading a sharded one compiles a computation each time."""
        if self.division is None or tensor.ndim == 0:
            return tensor
        # A new tensor: the given one keeps its sharding.
        return self.division.mark_whole(torch.stack([tensor.detach()])[0])

    def gather_object(self, value: T) -> list[T]:
        return [value]

    def gather_to_main(self, value: T) -> list[T]:
        return [value]
