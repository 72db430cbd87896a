"""The curves' shapes; tests/test_optim.py compares them with transformers' schedules."""

from __future__ import annotations

import pytest

from trainer_kit.utils.lr_curves import SCHEDULES, Span


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
