"""Collectives over several processes, and what fails on one of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from kit.ranks import on_ranks, try_on_ranks

from trainer_kit.strategies.ddp import DDP


def collectives() -> dict[str, Any]:
    strategy = DDP(device="cpu")
    strategy.setup()
    rank = strategy.rank
    rows = torch.arange(rank * 3.0).reshape(rank, 3)
    return {
        "sum": strategy.collectives.all_reduce(torch.tensor([rank + 1.0])),
        "max": strategy.collectives.all_reduce(torch.tensor(rank), "max"),
        "numbers": list(strategy.collectives.all_reduce_ints([rank, 2**40])),
        "rows": strategy.gather(rows.to(torch.bfloat16)),
        "flags": strategy.gather(torch.tensor([rank == 1])),
        "scalars": strategy.gather(torch.tensor(rank)),
        "objects": strategy.collectives.gather_object({"rank": rank}),
        "main": strategy.collectives.broadcast([rank]),
        "on_main": strategy.collectives.on_main(lambda: rank + 10),
        "ranks": (
            strategy.is_main,
            strategy.collectives.is_local_main,
            strategy.collectives.local_rank,
            strategy.world_size,
        ),
    }


@pytest.mark.distributed
def test_collectives_on_three_ranks() -> None:
    results = on_ranks(3, collectives)
    for rank, result in enumerate(results):
        assert result["sum"].tolist() == [6.0]
        assert result["max"].item() == 2
        assert result["numbers"] == [3, 3 * 2**40]
        assert result["rows"].dtype == torch.bfloat16
        assert result["rows"].tolist() == [[0, 1, 2], [0, 1, 2], [3, 4, 5]]
        assert result["flags"].tolist() == [False, True, False]
        assert result["scalars"].tolist() == [0, 1, 2]
        assert result["objects"] == [{"rank": 0}, {"rank": 1}, {"rank": 2}]
        assert (result["main"], result["on_main"]) == ([0], 10)
        assert result["ranks"] == (rank == 0, rank == 0, rank, 3)


def sums_of_scalars() -> tuple[list[float], ...]:
    strategy = DDP(device="cpu")
    strategy.setup()
    scalars = [*torch.randn(40, generator=torch.Generator().manual_seed(strategy.rank))]
    read = strategy.collectives.read_scalars
    together, one_by_one = read(scalars, summed=True), [read([scalar], summed=True)[0] for scalar in scalars]
    strategy.collectives.reader_size = 3  # of which the first process speaks for all
    return together, one_by_one, read(scalars, summed=True)


@pytest.mark.distributed
def test_a_sum_has_the_same_bits_however_many_are_read_at_once() -> None:
    """A save between two logs reads the losses of the steps before it by themselves."""
    for together, one_by_one, of_one_reader in on_ranks(3, sums_of_scalars):
        assert together == one_by_one
        assert of_one_reader == torch.randn(40, generator=torch.Generator().manual_seed(0)).tolist()


class Unportable(Exception):
    def __init__(self, first: str, second: str) -> None:
        super().__init__(first)


def failing_on_main(portable: bool) -> None:
    strategy = DDP(device="cpu")
    strategy.setup()

    def fail() -> None:
        raise ValueError("the disk is full") if portable else Unportable("the disk", "is full")

    strategy.collectives.on_main(fail)


@pytest.mark.distributed
@pytest.mark.parametrize("portable", [True, False])
def test_what_fails_on_the_main_process_fails_everywhere(portable: bool) -> None:
    first, second = try_on_ranks(2, failing_on_main, portable)
    assert "the disk" in str(first)
    assert "the disk" in str(second.error)
    assert isinstance(second.error, ValueError if portable else RuntimeError)


def numbered(backend: str) -> list[int]:
    dist.init_process_group(backend)
    strategy = DDP(device="cpu")
    strategy.setup()
    others = dist.new_group([0, 1], backend="gloo")
    before = strategy.collectives.begun()
    dist.all_reduce(torch.ones(1), group=others)
    return [strategy.collectives.begun() - before, before >= 0]


@pytest.mark.distributed
@pytest.mark.parametrize("backend", ["gloo", "cpu:gloo,cuda:gloo"])
def test_collectives_of_all_groups_are_numbered(backend: str) -> None:
    """A group with several backends has no number."""
    assert on_ranks(2, numbered, backend) == [[1, True]] * 2
