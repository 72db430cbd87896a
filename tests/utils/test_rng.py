"""Generators of random numbers."""

from __future__ import annotations

import random

import numpy as np
import torch

from trainer_kit.strategies.base import Strategy


def draws() -> tuple[float, float, float]:
    return torch.rand(()).item(), np.random.rand(), random.random()


def test_seeding_reaches_every_generator_of_the_host() -> None:
    strategy = Strategy()
    strategy.seed(2**63 - 1)
    first = draws()
    strategy.seed(5)
    second = draws()
    assert not set(first) & set(second)
    strategy.seed(2**63 - 1)
    assert draws() == first
