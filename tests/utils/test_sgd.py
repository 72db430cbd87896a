"""The fused SGD takes the steps of torch's own, up to rounding, from the first one on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from trainer_kit.utils.sgd import SGD, is_skipped


def trained(make: Any, idle: int = -1, **options: Any) -> list[torch.Tensor]:
    """Take steps; the parameter `idle` gets its first gradient in the third."""
    generator = torch.Generator().manual_seed(0)
    parameters = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in [(5, 4), (7,), ()]]
    optimizer = make(parameters, lr=0.1, **options)
    for step in range(5):
        for number, parameter in enumerate(parameters):
            grad = torch.randn(parameter.shape, generator=generator)
            parameter.grad = None if number == idle and step < 2 else grad
        optimizer.step()
    return [each.detach() for each in parameters]


@pytest.mark.parametrize("idle", [-1, 1])
@pytest.mark.parametrize(
    "options", [{}, {"momentum": 0.9}, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}], ids=str
)
def test_steps_are_those_of_torch(options: dict[str, Any], idle: int) -> None:
    ours, theirs = trained(SGD, idle, fused=True, **options), trained(torch.optim.SGD, idle, **options)
    for own, reference in zip(ours, theirs, strict=True):
        torch.testing.assert_close(own, reference, rtol=1e-6, atol=1e-7)


def test_a_first_step_that_overflows_leaves_no_momentum() -> None:
    parameter = nn.Parameter(torch.ones(100))
    optimizer: Any = SGD([parameter], lr=0.1, momentum=0.9, fused=True)
    for overflow in (1.0, 0.0):
        parameter.grad = torch.full((100,), 2.0)
        optimizer.found_inf = torch.tensor(overflow)
        optimizer.step()
        momentum = optimizer.state[parameter]["momentum_buffer"]
        assert torch.equal(momentum, torch.full((100,), 0.0 if overflow else 2.0))
    assert torch.equal(parameter.detach(), torch.ones(100).sub(2.0, alpha=0.1))


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_sparse_gradient_is_taken_as_by_torch(momentum: float) -> None:
    found = []
    for kind, fused in ((SGD, True), (torch.optim.SGD, False)):
        table = nn.Parameter(torch.ones(6, 2))
        optimizer: Any = kind([table], lr=0.1, momentum=momentum, fused=fused)
        for rows in ([0, 1], [1, 5, 5]):
            table.grad = None
            nn.functional.embedding(torch.tensor(rows), table, sparse=True).square().sum().backward()
            optimizer.step()
        found.append(table.detach())
    assert torch.equal(*found)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_what_torch_leaves_as_it_is(dtype: torch.dtype) -> None:
    parameter = nn.Parameter(torch.ones(64, dtype=dtype))
    parameter.grad = torch.ones_like(parameter)
    torch.optim.SGD([parameter], lr=0.5, fused=True).step()
    assert is_skipped(parameter) == bool((parameter == 1).any())
