"""Collection of sharded tensors on their owners, on real processes."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.ranks import RankFailed, on_ranks
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


def collected(sizes: tuple[int, ...], owners: list[int], bundle: int, taken: int) -> list[Any]:
    """The tensors that this process takes, the first ones of its own; the live ones have changed meanwhile."""
    strategy = FSDP(device="cpu")
    strategy.setup()
    usual, collect.BUNDLE_BYTES = collect.BUNDLE_BYTES, bundle
    placements = [Replicate(), Shard(0)] if len(sizes) == 2 else [Shard(0)]
    mesh = init_device_mesh("cpu", sizes)
    tensors = [distribute_tensor(each, mesh, placements) for each in values()]
    parts = [each.to_local().clone() for each in tensors]
    for each in tensors:
        each.to_local().zero_()
    collector = collect.ShardCollector(tensors, parts, owners, torch.device("cpu"), strategy.sharding.save_group)
    own = [tensor for tensor, owner in zip(tensors, owners, strict=True) if owner == strategy.rank]
    whole = [collector.take(tensor) for tensor in own[:taken]]
    collector.finish()
    collect.BUNDLE_BYTES = usual  # this process runs other tests too
    strategy.teardown()
    return whole


@pytest.mark.distributed
@pytest.mark.parametrize("bundle", [2**26, 16], ids=["one bundle", "a bundle each"])
@pytest.mark.parametrize(
    ("sizes", "owners"),
    [((2,), [0, 1, 0, 1, 1, 0]), ((2,), [0] * 6), ((2,), [1] * 6), ((3,), [2, 0, 1, 2, 0, 1]), ((2, 1), [0, 1] * 3)],
    ids=str,
)
def test_each_owner_has_its_tensors_whole(sizes: tuple[int, ...], owners: list[int], bundle: int) -> None:
    for taken in (6, 1):
        check(on_ranks(sizes[0], collected, sizes, owners, bundle, taken), owners, taken)


@pytest.mark.distributed
@pytest.mark.slow
def test_owners_in_several_copies_of_a_model() -> None:
    owners = [0, 1, 2, 3, 3, 2]
    check(on_ranks(4, collected, (2, 2), owners, 16, 6), owners, 6)


def check(found: list[Any], owners: list[int], taken: int) -> None:
    for rank, whole in enumerate(found):
        own = [value for value, owner in zip(values(), owners, strict=True) if owner == rank]
        for one, value in zip(whole, own[:taken], strict=True):
            assert torch.equal(one, value)
            assert one.dtype == value.dtype


def collected_twice() -> list[Any]:
    strategy = FSDP(device="cpu")
    strategy.setup()
    tensor = distribute_tensor(torch.arange(5.0), init_device_mesh("cpu", (2,)), [Shard(0)])
    part = tensor.to_local()
    collector = collect.ShardCollector([tensor] * 3, [part] * 3, [0, 1, 0], torch.device("cpu"))
    whole = [collector.take(tensor) for _ in range(2 if strategy.is_main else 1)]
    collector.finish()
    strategy.teardown()
    return whole


@pytest.mark.distributed
def test_a_tensor_may_go_to_several_owners() -> None:
    """As weights that a state shares with the model."""
    for whole, count in zip(on_ranks(2, collected_twice), (2, 1), strict=True):
        assert len(whole) == count
        assert all(torch.equal(each, torch.arange(5.0)) for each in whole)


def left_alone(folder: str) -> Any:
    strategy = FSDP(device="cpu")
    strategy.setup()
    tensor = distribute_tensor(torch.arange(5.0), init_device_mesh("cpu", (2,)), [Shard(0)])
    parts = [tensor.to_local()]
    if not strategy.is_main:
        time.sleep(1)
        os.kill(os.getpid(), signal.SIGKILL)
    with (
        pytest.raises(OSError, match="another process left before it had sent its part"),
        strategy.sharding.collecting([tensor], parts, [0], torch.Tensor.cpu) as whole,
    ):
        whole(tensor)
    Path(folder, "raised").touch()
    os._exit(0)


@pytest.mark.distributed
def test_a_process_that_dies_is_reported(tmp_path: Path) -> None:
    with pytest.raises(RankFailed, match="ended with exit code"):
        on_ranks(2, left_alone, str(tmp_path))
    assert (tmp_path / "raised").exists()


def on_main() -> Any:
    strategy = FSDP(device="cpu")
    strategy.setup()
    tensor = distribute_tensor(torch.arange(6.0), init_device_mesh("cpu", (2,)), [Shard(0)])
    state = strategy.sharding.collect_on_main({"one": [tensor, 3], "tied": tensor, "plain": torch.ones(2)})
    strategy.teardown()
    if not strategy.is_main:
        return state["tied"].to_local().tolist()
    return state["one"][0].tolist(), state["one"][0] is state["tied"], state["plain"].tolist()


@pytest.mark.distributed
def test_a_state_is_whole_on_the_main_process() -> None:
    assert on_ranks(2, on_main) == [([0.0, 1, 2, 3, 4, 5], True, [1.0, 1.0]), [3.0, 4, 5]]
