"""Parts of tensors over the axes of a mesh, on real processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kit.ranks import on_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from trainer_kit.strategies.fsdp.strategy import FSDP


@pytest.mark.parametrize(
    ("mesh", "processes", "shards"), [(None, 4, 4), ({"shard": 1, "replicate": 1}, 4, 4), (None, 1, 1)]
)
def test_a_model_is_divided_over_the_processes(mesh: Any, processes: int, shards: int) -> None:
    strategy = FSDP(device="cpu", mesh=mesh)
    assert strategy.sharding.count_shards(processes) == shards
    assert not strategy.sharding.is_active


def parts() -> Any:
    strategy = FSDP(device="cpu")
    strategy.setup()
    sharding, mesh = strategy.sharding, init_device_mesh("cpu", (2,))
    tensor, plain = distribute_tensor(torch.arange(6.0).reshape(3, 2), mesh, [Shard(0)]), torch.ones(2)
    (part, box), (own, same) = sharding.placement(tensor), sharding.own_parts([tensor, plain])
    placed = sharding.place_like(torch.ones(3, 2), tensor)
    whole = sharding.whole_tensors({"tensor": tensor, "plain": plain})
    strategy.teardown()
    assert sharding.is_active
    assert sharding.placement(plain) is None
    assert same is plain
    assert own.data_ptr() == part.data_ptr() == tensor.to_local().data_ptr()
    assert isinstance(placed, DTensor)
    assert placed.placements == tensor.placements
    assert sharding.place_like(placed, tensor) is placed
    assert whole["plain"] is plain
    return part.tolist(), box.offsets, box.sizes, whole["tensor"].tolist()


@pytest.mark.distributed
def test_a_process_holds_its_rows() -> None:
    whole = [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]
    assert on_ranks(2, parts) == [(whole[:2], (0, 0), (2, 2), whole), (whole[2:], (2, 0), (1, 2), whole)]
