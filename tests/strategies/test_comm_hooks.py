"""Communication hooks of DistributedDataParallel."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kit.ranks import on_ranks

from trainer_kit import DDP


def gradient(hook: tuple[str, str, dict[str, Any]] | None) -> torch.Tensor:
    """Gradient of a layer after a few steps on this rank's own batches."""
    strategy = DDP(comm_hook=hook, device="cpu")
    strategy.setup()
    torch.manual_seed(0)
    model = strategy.prepare(torch.nn.Linear(64, 32, bias=False))
    for step in range(4):
        model.zero_grad()
        batch = torch.randn(16, 64, generator=torch.Generator().manual_seed(10 * step + strategy.rank))
        strategy.backward(model(batch).square().mean())
    found = model.weight.grad.clone()
    strategy.teardown()
    return found


@pytest.mark.distributed
@pytest.mark.parametrize("name", ["fp16", "bf16", "power_sgd"])
def test_a_hook_changes_the_exchange(name: str) -> None:
    options = {"matrix_approximation_rank": 8, "start_powerSGD_iter": 2} if "sgd" in name else {}
    exact, _ = on_ranks(2, gradient, None)
    compressed, other = on_ranks(2, gradient, (name, "no", options))
    assert torch.equal(compressed, other)
    assert not torch.equal(compressed, exact)
    if "sgd" not in name:
        torch.testing.assert_close(compressed, exact, rtol=0.01, atol=1e-4)


@pytest.mark.distributed
def test_a_wrapper_changes_what_power_sgd_sends() -> None:
    options = {"matrix_approximation_rank": 8, "start_powerSGD_iter": 2}
    plain, _ = on_ranks(2, gradient, ("power_sgd", "no", options))
    wrapped, other = on_ranks(2, gradient, ("power_sgd", "bf16", options))
    assert torch.equal(wrapped, other)
    assert not torch.equal(wrapped, plain)


@pytest.mark.parametrize("hook", [("zip", "no", {}), ("fp16", "zip", {})])
def test_an_unknown_hook(hook: tuple[str, str, dict[str, Any]]) -> None:
    with pytest.raises(ValueError, match=r"the communication hook '.*' with the wrapper '.*' is not known; use one of"):
        DDP(comm_hook=hook)


def test_a_hook_that_fails_in_torch_is_refused_before_training() -> None:
    with pytest.raises(ValueError, match="'batched_power_sgd' fails in torch; use 'power_sgd'"):
        DDP(comm_hook=("batched_power_sgd", "no", {}))


def test_two_ways_to_compress() -> None:
    with pytest.raises(ValueError, match="give one of them"):
        DDP(comm_hook=("fp16", "no", {}), gradient_compression="bf16")
