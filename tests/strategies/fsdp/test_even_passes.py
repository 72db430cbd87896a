"""As many forward passes on each process, with a model that waits for the others in each."""

from __future__ import annotations

import contextlib

import pytest
import torch
from kit.ranks import on_ranks
from torch import nn

from trainer_kit.strategies.ddp import DDP
from trainer_kit.strategies.fsdp.even_passes import EvenPasses


class Waiting(nn.Module):
    def __init__(self, strategy: DDP) -> None:
        super().__init__()
        self.strategy, self.seen = strategy, list[tuple[float, bool]]()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        self.strategy.barrier()
        self.seen.append((float(x.sum()) * scale, self.training))
        return x


def passes(numbers: list[int]) -> list[tuple[float, bool]]:
    strategy = DDP(device="cpu")
    strategy.setup()
    model = Waiting(strategy)
    even = EvenPasses(strategy.collectives, contextlib.nullcontext)
    even.watch(model)
    with even.evened(), torch.no_grad():
        for number in range(numbers[strategy.rank]):
            model(torch.full((2,), float(number)), scale=strategy.rank + 1.0)
    with torch.no_grad():
        model(torch.ones(1))  # outside, all processes have as many
    strategy.teardown()
    return model.seen


@pytest.mark.distributed
@pytest.mark.parametrize("numbers", [[1, 3], [3, 1], [0, 2], [2, 0], [0, 0], [2, 2]])
def test_a_process_repeats_its_last_pass(numbers: list[int]) -> None:
    for rank, seen in enumerate(on_ranks(2, passes, numbers)):
        own, most = numbers[rank], max(numbers)
        assert len(seen) == most + 1
        assert seen[:own] == [(2.0 * number * (rank + 1), True) for number in range(own)]
        source = rank if own else 1 - rank  # without a pass, the other's first input
        repeated = 2.0 * max(own - 1, 0) * (source + 1)
        assert seen[own:most] == [(repeated, False)] * (most - own)


def inside_twice() -> None:
    strategy = DDP(device="cpu")
    strategy.setup()
    even = EvenPasses(strategy.collectives, contextlib.nullcontext)
    with pytest.raises(ZeroDivisionError), even.evened():
        raise ZeroDivisionError
    with even.evened(), pytest.raises(AssertionError, match="not reentrant"), even.evened():
        pass
    strategy.teardown()


@pytest.mark.distributed
def test_an_error_ends_it_at_once() -> None:
    on_ranks(2, inside_twice)
