"""Collection of sharded tensors on their owners, on real processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kit.ranks import on_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from trainer_kit.strategies.fsdp import collect
from trainer_kit.strategies.fsdp.strategy import FSDP

SHAPES = [(5, 3), (4,), (1, 2), (0, 2), (7,), (3, 3)]
DTYPES = [torch.float32, torch.bfloat16, torch.int8, torch.float64, torch.float32, torch.int64]


def values() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randint(0, 100, shape, generator=generator).to(dtype) for shape, dtype in zip(SHAPES, DTYPES, strict=True)
    ]


def collected(sizes: tuple[int, ...], owners: list[int], bundle: int) -> list[Any]:
    """What lies on this process, of tensors of which the last is not sharded."""
    strategy = FSDP(device="cpu")
    strategy.setup()
    collect.BUNDLE_BYTES = bundle
    placements = [Replicate(), Shard(0)] if len(sizes) == 2 else [Shard(0)]
    mesh = init_device_mesh("cpu", sizes)
    whole = values()
    tensors: list[torch.Tensor] = [distribute_tensor(each, mesh, placements) for each in whole[:-1]]
    tensors.append(whole[-1])
    owned = [owner == strategy.rank for owner in owners]
    places = [torch.empty_like(each) if own else None for each, own in zip(whole, owned, strict=True)]
    strategy.collect(tensors, owners, places)
    strategy.teardown()
    return places


@pytest.mark.distributed
@pytest.mark.parametrize("bundle", [2**26, 16], ids=["one bundle", "a bundle each"])
@pytest.mark.parametrize(
    ("sizes", "owners"),
    [((2,), [0, 1, 0, 1, 1, 0]), ((2,), [0] * 6), ((2,), [1] * 6), ((3,), [2, 0, 1, 2, 0, 1]), ((2, 1), [0, 1] * 3)],
    ids=str,
)
def test_each_owner_has_its_tensors_whole(sizes: tuple[int, ...], owners: list[int], bundle: int) -> None:
    for rank, places in enumerate(on_ranks(sizes[0], collected, sizes, owners, bundle)):
        for owner, place, value in zip(owners, places, values(), strict=True):
            assert (place is not None) == (owner == rank)
            if place is not None:
                assert torch.equal(place, value)


@pytest.mark.distributed
@pytest.mark.slow
def test_owners_in_several_copies_of_a_model() -> None:
    for rank, places in enumerate(on_ranks(4, collected, (2, 2), [0, 1, 2, 3, 3, 2], 16)):
        for owner, place, value in zip([0, 1, 2, 3, 3, 2], places, values(), strict=True):
            assert (place is not None) == (owner == rank)
            assert place is None or torch.equal(place, value)


def on_main() -> Any:
    strategy = FSDP(device="cpu")
    strategy.setup()
    tensor = distribute_tensor(torch.arange(6.0), init_device_mesh("cpu", (2,)), [Shard(0)])
    state = strategy.collect_on_main({"one": [tensor, 3], "tied": tensor, "plain": torch.ones(2)})
    strategy.teardown()
    if not strategy.is_main:
        return state["tied"].to_local().tolist()
    return state["one"][0].tolist(), state["one"][0] is state["tied"], state["plain"].tolist()


@pytest.mark.distributed
def test_a_state_is_whole_on_the_main_process() -> None:
    assert on_ranks(2, on_main) == [([0.0, 1, 2, 3, 4, 5], True, [1.0, 1.0]), [3.0, 4, 5]]
