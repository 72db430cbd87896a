"""The parts of sharded tensors: what fills them on real processes is what they gather to."""

from __future__ import annotations

import itertools

import pytest
import torch
from kit.ranks import on_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from trainer_kit.strategies.fsdp.placement import box_at, fill, fill_from_main
from trainer_kit.strategies.fsdp.strategy import FSDP

SHAPES = [(4, 3), (5,), (1, 2, 2), (0, 3)]


def gathered(way: str) -> list[torch.Tensor]:
    strategy = FSDP(device="cpu")
    strategy.setup()
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))
    values = {str(number): torch.rand(shape, dtype=torch.float64) for number, shape in enumerate(SHAPES)}
    values["plain"] = torch.tensor([1, 2], dtype=torch.int8)
    if way != "main":
        values = strategy.collectives.broadcast(values)
    targets: dict[str, torch.Tensor] = {
        name: distribute_tensor(torch.zeros_like(value), mesh, [Replicate(), Shard(0)], src_data_rank=None)
        for name, value in values.items()
    }
    targets["plain"] = torch.zeros_like(values["plain"])
    if way == "main":
        fill_from_main(targets, values)
        values = strategy.collectives.broadcast(values)
    for name, target in targets.items():
        if way == "fill":
            fill(target, values[name])
    whole = {name: each.full_tensor() if isinstance(each, DTensor) else each for name, each in targets.items()}
    strategy.teardown()
    return [whole[name] - values[name] for name in values]


@pytest.mark.distributed
@pytest.mark.parametrize("way", ["fill", "main"])
def test_parts_gather_to_the_whole(way: str) -> None:
    for differences in on_ranks(2, gathered, way):
        assert [each.shape for each in differences] == [*map(torch.Size, SHAPES), torch.Size([2])]
        assert not any(each.any() for each in differences)


@pytest.mark.parametrize("rows", [2, 4, 6, 10, 14, 34])
@pytest.mark.parametrize("mesh", [(2, 2), (3, 2), (2, 3, 2)])
def test_parts_of_a_split_layer_are_boxes(rows: int, mesh: tuple[int, ...]) -> None:
    """Also uneven ones, and in a number of rows that leaves a process without any."""
    copies = (Replicate(),) * (len(mesh) - 2)
    for placements in ((_StridedShard(0, split_factor=2), Shard(0)), (Shard(0), Shard(1)), (Shard(0), Replicate())):
        covered = torch.zeros(rows, 4)
        for place in itertools.product(*map(range, mesh)):
            box = box_at((rows, 4), mesh, place, (*copies, *placements))
            sizes, offsets = _compute_local_shape_and_global_offset((rows, 4), mesh, [*place], (*copies, *placements))
            assert box.sizes == sizes
            assert box.offsets == offsets or not box.numel
            part = covered
            for dimension, (start, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
                part = part.narrow(dimension, start, size)
            part += 1
        copied = covered[0, 0].item()
        assert (covered == copied).all()
