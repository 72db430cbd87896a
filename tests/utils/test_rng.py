"""Generators of random numbers."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainer_kit.strategies.base import Strategy
from trainer_kit.utils import rng
from trainer_kit.utils.rng import KeptGenerators, generators_kept, seed_generators, torch_memory

USES: dict[str, Callable[[], object]] = {
    "normal": np.random.standard_normal,  # every second one comes without a draw
    "normals": lambda: np.random.randn(3),
    "uniform": np.random.rand,
    "shuffle": lambda: np.random.permutation(700),  # more words than the state has
    "python": random.random,
    "gauss": lambda: random.gauss(0, 1),
    "torch": lambda: torch.rand(3),
    "seed": lambda: seed_generators(7),
}


def draws() -> tuple[float, float, float]:
    return torch.rand(()).item(), np.random.rand(), random.random()


@pytest.mark.parametrize("seed", [0, 1, 2**32, 2**32 + 1, 2**63 - 1])
def test_pythons_generator_is_seeded_as_numpys_with_a_seed_of_its_own(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def python() -> tuple[float, ...]:
        random.gauss(0, 1)  # the second number of a pair is kept, and must be dropped
        seed_generators(seed)
        return (random.gauss(0, 1), *(random.random() for _ in range(700)))

    as_memory = python()
    seed_generators(seed)
    state = random.getstate()
    assert [random.random(), random.random()] != [np.random.rand(), np.random.rand()]
    monkeypatch.setattr(rng, "_ADDRESS", None)
    assert python() == as_memory
    seed_generators(seed)
    assert random.getstate() == state
    seed_generators(seed + 1)
    assert random.getstate() != state


def test_seeding_reaches_every_generator_of_the_host() -> None:
    strategy = Strategy()
    strategy.seed(2**63 - 1)
    first = draws()
    strategy.seed(5)
    second = draws()
    assert not set(first) & set(second)
    strategy.seed(2**63 - 1)
    assert draws() == first


@pytest.mark.parametrize("by_memory", [True, False])
@given(st.integers(0, 2**32 - 1), *[st.lists(st.sampled_from(list(USES)), max_size=5)] * 3)
def test_generators_are_kept(
    by_memory: bool, seed: int, before: list[str], inside: list[str], after: list[str]
) -> None:
    def use(with_context: bool) -> list[object]:
        seed_generators(seed)
        for name in before:
            USES[name]()
        if with_context:
            with generators_kept(torch.device("cpu")):
                for name in inside:
                    USES[name]()
        return [*map(repr, (USES[name]() for name in after)), *draws(), np.random.standard_normal(2).tolist()]

    with pytest.MonkeyPatch.context() as patch:
        if not by_memory:
            patch.setattr(rng, "_ADDRESS", None)
        assert use(True) == use(False)


def test_pythons_generator_is_known_as_memory_on_cpython() -> None:
    assert (rng._ADDRESS is not None) == (sys.implementation.name == "cpython")


@pytest.mark.parametrize("by_memory", [True, False])
@pytest.mark.parametrize("spare", [False, True])
@pytest.mark.parametrize("name", [None, *USES])
def test_a_change_is_seen(name: str | None, spare: bool, by_memory: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A normal number that numpy keeps is drawn without a change: then the caller knows that it cannot tell."""
    if not by_memory:
        monkeypatch.setattr(rng, "_ADDRESS", None)
    seed_generators(1)
    np.random.standard_normal(int(spare))
    states, torch_before = KeptGenerators(), torch_memory()
    assert states.has_unused_normal == spare
    if name is not None:
        USES[name]()
    seen = states.have_changed() or torch_memory() != torch_before
    assert seen == (name is not None or spare)
    states.restore()
    assert torch_memory() == torch_before
    seed_generators(1)
    np.random.standard_normal(int(spare))
    expected = [*draws(), random.gauss(0, 1), *np.random.standard_normal(2)]
    states.restore()
    assert [*draws(), random.gauss(0, 1), *np.random.standard_normal(2)] == expected


def test_a_context_begins_with_the_state_outside() -> None:
    for number in range(3):
        seed_generators(1)
        np.random.standard_normal(number)
        expected = np.random.standard_normal(3).tolist()
        seed_generators(1)
        np.random.standard_normal(number)
        with generators_kept(torch.device("cpu")):
            assert np.random.standard_normal(3).tolist() == expected
        assert np.random.standard_normal(3).tolist() == expected


def test_generators_are_kept_after_an_error() -> None:
    seed_generators(1)
    expected = draws()
    seed_generators(1)

    def fail() -> None:
        draws()
        raise KeyError

    with pytest.raises(KeyError), generators_kept(torch.device("cpu")):
        fail()
    assert draws() == expected


@pytest.mark.parametrize("outside", [np.random.MT19937, np.random.PCG64])
@pytest.mark.parametrize("inside", [None, np.random.MT19937, np.random.PCG64])
@pytest.mark.parametrize("normals", [0, 1])
def test_another_generator_of_numpy_is_kept(outside: type, inside: type | None, normals: int) -> None:
    usual, other = np.random.get_bit_generator(), None if inside is None else inside(5)
    np.random.set_bit_generator(outside(3))
    try:
        np.random.standard_normal(normals)
        expected = np.random.standard_normal(3).tolist()
        np.random.set_bit_generator(outside(3))
        np.random.standard_normal(normals)
        with generators_kept(torch.device("cpu")):
            if other is not None:
                np.random.set_bit_generator(other)
                before = repr(other.state)
            else:
                np.random.rand(3)
        assert other is None or repr(other.state) == before
        assert np.random.standard_normal(3).tolist() == expected
    finally:
        np.random.set_bit_generator(usual)
