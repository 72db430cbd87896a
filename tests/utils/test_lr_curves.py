"""The curves' shapes; tests/test_optim.py compares them with transformers' schedules."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from trainer_kit.utils.lr_curves import SCHEDULES, Span, peak_of


@pytest.mark.parametrize("name", sorted(SCHEDULES))
@pytest.mark.parametrize("warmup", [0, 3])
def test_a_factor_is_finite_and_at_most_one(name: str, warmup: int) -> None:
    options = {"min_lr_rate": 0.1} if name == "cosine_with_min_lr" else {}
    factor = SCHEDULES[name](Span(20, warmup, 0.1), **options)
    factors = [factor(step) for step in range(21)]
    assert all(0 <= each <= 1 for each in factors)
    assert max(factors) == 1.0


def test_restarts_begin_again_at_the_top() -> None:
    factor = SCHEDULES["cosine_with_restarts"](Span(20, 0, 0.1), num_cycles=2)
    assert [factor(0), factor(10), factor(20)] == [1.0, 1.0, 0.0]
    assert factor(9) < 0.05


def test_a_floor_is_reached_at_the_end() -> None:
    assert SCHEDULES["cosine_with_min_lr"](Span(20, 0, 0.1), min_lr=0.01)(20) == pytest.approx(0.1)
    assert SCHEDULES["cosine_with_min_lr"](Span(20, 0, 0.0), min_lr=0.0)(20) == 0.0


@pytest.mark.parametrize("default", [{}, {"lr": None}, {"lr": object()}, {"lr": 0.5}])
def test_the_peak_is_the_default_rate_else_that_of_the_first_group(default: dict[str, Any]) -> None:
    optimizer = torch.optim.SGD([{"params": [nn.Parameter(torch.zeros(1))], "lr": 0.25}], lr=1.0)
    optimizer.defaults = default
    assert peak_of(optimizer) == (0.5 if default.get("lr") == 0.5 else 0.25)


def test_a_wrapper_without_defaults_has_the_peak_of_its_first_group() -> None:
    wrapper: Any = SimpleNamespace(param_groups=[{"lr": 0.1, "initial_lr": 0.2}])
    assert peak_of(wrapper) == 0.2


def test_a_default_rate_that_is_a_tensor_is_no_longer_that_of_the_groups() -> None:
    optimizer = torch.optim.AdamW([nn.Parameter(torch.zeros(1))], lr=torch.tensor(0.5))
    assert peak_of(optimizer) == 0.5
    optimizer.param_groups[0]["lr"].fill_(0.1)
    assert peak_of(optimizer) == 0.5
