"""`MeshSharding`: tensors that torch's `fully_shard` divides over the axes of a mesh of processes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from trainer_kit.strategies.fsdp.collect import ShardCollector
from trainer_kit.strategies.fsdp.norms import sharded_norms
from trainer_kit.strategies.fsdp.placement import box_of, sharded_like, whole_tensors
from trainer_kit.strategies.grad_norms import GradientNorms
from trainer_kit.strategies.process_group import ProcessGroup
from trainer_kit.strategies.sharding import Sharding, ToHost
from trainer_kit.utils.box import Part
from trainer_kit.utils.pytree import map_tensors, tensors

T = TypeVar("T")


class MeshSharding(Sharding):
    """Division over a mesh; with one process, nothing is divided.

    Args:
        group: The processes.
        mesh: Number of processes by axis.

    Attributes:
        save_group: The group in which parts are sent to those who write them, while another thread trains.
    """

    def __init__(self, group: ProcessGroup, mesh: Mapping[str, int]) -> None:
        self._group = group
        self._mesh = mesh
        self.is_active = not group.is_alone
        self.save_group: dist.ProcessGroup | None = None
        self._collector: ShardCollector | None = None  # of the last save

    def count_shards(self, processes: int) -> int:
        return max(1, processes // self._mesh.get("replicate", 1))

    def is_sharded(self, tensor: torch.Tensor) -> bool:
        return isinstance(tensor, DTensor)

    def placement(self, tensor: torch.Tensor) -> Part | None:
        return (tensor.to_local().detach(), box_of(tensor)) if isinstance(tensor, DTensor) else None

    def own_parts(self, tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        return [each.to_local().detach() if isinstance(each, DTensor) else each for each in tensors]

    def place_like(self, value: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(value, DTensor) or not isinstance(tensor, DTensor):
            return value
        return sharded_like(tensor, value)

    def whole_tensors(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        with self._group.watched():
            return whole_tensors(tensors)

    def gradient_norms(self, parameters: list[torch.Tensor], grads: list[torch.Tensor]) -> GradientNorms:
        with self._group.watched():
            return sharded_norms(parameters, grads)

    @property
    def is_waiting(self) -> bool:
        return self._collector is not None and self._collector.is_waiting

    def collecting(
        self,
        tensors: Sequence[torch.Tensor],
        parts: Sequence[torch.Tensor],
        owners: Sequence[int],
        to_host: ToHost,
    ) -> contextlib.AbstractContextManager[ToHost]:
        if not self.is_active:
            return super().collecting(tensors, parts, owners, to_host)
        collector = self._collector = ShardCollector(tensors, parts, owners, torch.device("cpu"), self.save_group)
        return _collecting(collector, to_host)

    def collect_on_main(self, state: T) -> T:
        sharded = [*{id(each): each for each in tensors(state) if isinstance(each, DTensor)}.values()]
        if not sharded:
            return state
        parts = self.own_parts(sharded)
        collector = ShardCollector(sharded, parts, [0] * len(sharded), parts[0].device)
        with self._group.watched():
            if self._group.place.rank > 0:
                collector.finish()
                return state
            whole = {id(each): collector.take(each) for each in sharded}
        collected: T = map_tensors(lambda each: whole.get(id(each), each), state)
        return collected


@contextlib.contextmanager
def _collecting(collector: ShardCollector, to_host: ToHost) -> Iterator[ToHost]:
    try:
        yield lambda tensor: collector.take(tensor) if isinstance(tensor, DTensor) else to_host(tensor)
    finally:
        collector.finish()
