"""Norms of gradients of any dtype."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from trainer_kit.strategies.base import Strategy
from trainer_kit.strategies.grad_norms import gradient_norms


def test_norms_of_several_dtypes() -> None:
    mixed = [torch.full((4,), 2.0), torch.full((4,), 2.0, dtype=torch.bfloat16)]
    norms = gradient_norms(mixed, mixed)
    assert norms.each.tolist() == [4.0, 4.0]
    assert norms.total.item() == pytest.approx(32**0.5)
    double = [torch.full((4,), 2.0, dtype=torch.float64)]
    assert gradient_norms(double, double).total.dtype == torch.float64
    large = torch.full((4,), 2.0**200, dtype=torch.float64)  # infinite in float32
    assert gradient_norms([*mixed, large], [*mixed, large]).each.tolist() == [4.0, 4.0, 2.0**201]


def test_norms_of_half_precision_are_computed_in_float32() -> None:
    for dtype, size in ((torch.bfloat16, 1.01), (torch.float16, 300.0)):  # whose square fp16 cannot hold
        parameters = [nn.Parameter(torch.zeros(50, 50, dtype=dtype)) for _ in range(3)]
        for parameter in parameters:
            parameter.grad = torch.full_like(parameter, size)
        value = float(parameters[0].grad[0, 0])  # type: ignore[index]
        strategy = Strategy()
        strategy.setup()
        norms = strategy.step(torch.optim.SGD(parameters, lr=0.0), max_norm=1.0)
        assert norms is not None
        assert (norms.each.dtype, norms.total.dtype) == (torch.float32, torch.float32)
        assert norms.each.tolist() == pytest.approx([value * 50] * 3, rel=1e-6)
        assert norms.total.item() == pytest.approx(value * 50 * 3**0.5, rel=1e-6)
        expected = torch.full((50, 50), value).double() / (value * 50 * 3**0.5)
        torch.testing.assert_close(parameters[0].grad, expected.to(dtype))
