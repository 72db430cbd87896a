"""Norms of gradients of any dtype."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from trainer_kit.strategies.base import Strategy
from trainer_kit.strategies.grad_norms import clip_to_norm, gradient_norms


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


@settings(max_examples=200, deadline=None)
@given(
    st.floats(1e-12, 1e12),
    st.sampled_from([0.0, 1e-6, 0.5, 1 - 1e-6, 1 - 2e-6, 1 - 1e-7, 1.0, 1 + 1e-7, 2.0, float("inf"), float("nan")]),
    st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
)
def test_a_norm_that_the_host_knows_changes_no_bit(max_norm: float, share: float, dtype: torch.dtype) -> None:
    """Around the largest norm the factor may round to less than 1: there it is not left out."""
    values = torch.tensor([max_norm * share, 0.0, -0.0], dtype=dtype)
    known, unknown = [values.clone()], [values.clone()]
    total = gradient_norms(known, known).total
    clip_to_norm(known, total, max_norm, total.item())
    clip_to_norm(unknown, total, max_norm)
    assert known[0].view(torch.uint8).tolist() == unknown[0].view(torch.uint8).tolist()


def test_gradients_below_the_largest_norm_are_not_written() -> None:
    grads = [torch.ones(4)]
    clip_to_norm(grads, torch.tensor(2.0), 2.1, 2.0)
    assert grads[0]._version == 0
    clip_to_norm(grads, torch.tensor(2.0), 1.9, 2.0)
    assert grads[0]._version == 1
