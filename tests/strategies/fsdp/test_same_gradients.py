"""Gradients that differ on processes that read the same batches are refused."""

from __future__ import annotations

import pytest
import torch
from kit.ranks import RankFailed, try_on_ranks
from kit.split_training import PLAN, Tower

from trainer_kit.strategies.fsdp.same_gradients import SameGradients
from trainer_kit.strategies.fsdp.strategy import FSDP


def check_infinite_gradient(mesh: dict[str, int]) -> None:
    """Check a gradient that is infinite in the first step, and differs between the processes in the second."""
    strategy = FSDP(device="cpu", mesh=mesh, tensor_parallel=PLAN)
    strategy.setup()
    parameters = dict(strategy.prepare(Tower()).named_parameters())
    weight = parameters["embedding.weight"]
    check = SameGradients(strategy.collectives, torch.distributed.group.WORLD)
    for value in (float("inf"), 1.0 + torch.distributed.get_rank()):
        weight.grad = torch.full_like(weight, value)
        check.check({"embedding.weight": weight})


@pytest.mark.distributed
def test_a_gradient_that_is_infinite_at_first_is_checked_later() -> None:
    for each in try_on_ranks(2, check_infinite_gradient, {"tensor": 2}):
        assert isinstance(each, RankFailed)
        assert "the gradient of 'embedding.weight' differs" in str(each.error)
