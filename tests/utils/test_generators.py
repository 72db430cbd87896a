"""States of random generators that objects keep for themselves."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from trainer_kit.utils.generators import (
    is_generator,
    is_global_generator,
    set_state_of_generator,
    state_of_generator,
)
from trainer_kit.utils.module_modes import state_aside
from trainer_kit.utils.pytree import flatten_state, unflatten_state

KINDS: list[tuple[Callable[[], Any], Callable[[Any], Any]]] = [
    (lambda: random.Random(1), lambda each: each.gauss(0, 1)),
    (lambda: torch.Generator().manual_seed(1), lambda each: torch.randn(3, generator=each).tolist()),
    (lambda: np.random.default_rng(1), lambda each: each.normal(size=3).tolist()),
    (lambda: np.random.Generator(np.random.MT19937(1)), lambda each: each.normal(size=3).tolist()),
    (lambda: np.random.RandomState(1), lambda each: each.normal(size=3).tolist()),
]


@pytest.mark.parametrize(("make", "draw"), KINDS)
def test_a_generator_goes_on_from_a_saved_state(make: Callable[[], Any], draw: Callable[[Any], Any]) -> None:
    first, other = make(), make()
    draw(first)
    tree, tensors = flatten_state(state_of_generator(first))
    expected = [draw(first) for _ in range(3)]
    set_state_of_generator(other, unflatten_state(tree, tensors))
    assert [draw(other) for _ in range(3)] == expected
    assert is_generator(first)
    assert not is_global_generator(first)


@pytest.mark.parametrize("make", [make for make, _ in KINDS])
def test_the_state_of_another_kind_is_an_error(make: Callable[[], Any]) -> None:
    other = torch.Generator() if not isinstance(make(), torch.Generator) else np.random.default_rng()
    with pytest.raises((TypeError, ValueError, RuntimeError, KeyError)):
        set_state_of_generator(make(), state_of_generator(other))


def test_the_global_generators() -> None:
    for each in (random._inst, torch.default_generator, np.random.mtrand._rand):  # type: ignore[attr-defined]
        assert is_generator(each)
        assert is_global_generator(each)
    assert not is_generator(torch.ones(1))


def test_the_generator_of_the_system_has_no_state() -> None:
    model = torch.nn.Linear(1, 1)
    model.system = random.SystemRandom()
    assert not is_generator(model.system)
    with state_aside(model):
        model.system.random()
