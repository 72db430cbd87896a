"""A model that is sharded in place, on real processes."""

from __future__ import annotations

import pytest
import torch
from kit.ranks import on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from trainer_kit.strategies.fsdp.sharded_model import ShardedModel
from trainer_kit.strategies.fsdp.strategy import FSDP
from trainer_kit.strategies.fsdp.units import find_units


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        self.head = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(x))


def after_passes() -> dict[str, bool]:
    strategy = FSDP(device="cpu")
    strategy.setup()
    torch.manual_seed(strategy.rank)  # each process has other weights
    model = Model()
    head, before = model.head.weight, model.head.weight.detach().clone()
    options = {"mesh": init_device_mesh("cpu", (2,))}
    sharded = ShardedModel(model, find_units(model), torch.device("cpu"), options, strategy.collectives)
    found = {"main's": torch.equal(model.head.weight.full_tensor(), strategy.collectives.broadcast(before))}
    found["known"] = sharded.sharded[head] is model.head.weight
    with torch.no_grad():
        model(torch.ones(3, 4))
    found["sharded after an evaluation"] = isinstance(model.head.weight, DTensor)
    outputs = model(torch.ones(2, 3, 4))
    outputs += 1  # in place, on what would be a view
    outputs.sum().backward()
    found["gradients"] = all(each.grad is not None for each in model.parameters())
    found["summed"] = bool((model.head.bias.grad.full_tensor() == 12).all())
    strategy.teardown()
    return found


@pytest.mark.distributed
def test_weights_stay_sharded_and_gradients_are_summed() -> None:
    for found in on_ranks(2, after_passes):
        assert all(found.values()), found
