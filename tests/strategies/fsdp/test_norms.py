"""Norms of sharded gradients, on real processes."""

from __future__ import annotations

import pytest
import torch
from kit.ranks import on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from trainer_kit.strategies.fsdp.norms import sharded_norms
from trainer_kit.strategies.fsdp.strategy import FSDP


def norms_here() -> tuple[list[float], float]:
    """A whole parameter, one with rows for each rank, and one with rows for the first alone."""
    strategy = FSDP(device="cpu")
    strategy.setup()
    mesh = init_device_mesh("cpu", (2,))
    whole = [torch.arange(float(rows * 2)).reshape(rows, 2) + 1 for rows in (2, 3, 1)]
    parameters: list[torch.Tensor] = [nn.Parameter(whole[0])]
    parameters += [nn.Parameter(distribute_tensor(each, mesh, [Shard(0)])) for each in whole[1:]]
    for parameter in parameters:
        parameter.grad = parameter.detach().clone()
    norms = sharded_norms(parameters, strategy.sharding.gradients(parameters))
    strategy.teardown()
    return norms.each.tolist(), norms.total.item()


@pytest.mark.distributed
def test_norms_are_those_of_the_whole_gradients() -> None:
    squares = [30.0, 91.0, 5.0]
    for each, total in on_ranks(2, norms_here):
        assert each == pytest.approx([square**0.5 for square in squares])
        assert total == pytest.approx(sum(squares) ** 0.5)
