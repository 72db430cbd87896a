"""Generators of random numbers."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, TimeoutError

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from trainer_kit.strategies.base import Strategy
from trainer_kit.utils import rng
from trainer_kit.utils.rng import (
    KeptGenerators,
    generator_states,
    generators_kept,
    read_watched,
    seed_generators,
    set_generator_states,
)

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


def forget_memory(patch: pytest.MonkeyPatch) -> None:
    """Let the generators' states be converted, as where they cannot be found in memory."""
    host = rng._host()
    patch.setattr(host.python, "memory", None)
    patch.setattr(host.numpy, "normal", None)
    patch.setattr(host.torch, "memory", None)
    patch.setattr(host, "reads", None)


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
    forget_memory(monkeypatch)
    assert python() == as_memory
    seed_generators(seed)
    assert random.getstate() == state
    seed_generators(seed + 1)
    assert random.getstate() != state


@pytest.mark.parametrize("by_memory", [True, False])
@given(seed=st.integers(0, 2**63 - 1), uses=st.lists(st.sampled_from(list(USES)), max_size=3))
def test_the_numbers_are_those_of_torchs_and_numpys_own_seeds(by_memory: bool, seed: int, uses: list[str]) -> None:
    for name in uses:
        USES[name]()
    with pytest.MonkeyPatch.context() as patch:
        if not by_memory:
            forget_memory(patch)
        seed_generators(seed)
        after = [*np.random.standard_normal(3), *np.random.rand(700)], torch.rand(700).tolist(), torch.randn(3).tolist()
    of_random = np.random.RandomState(((seed + 1) * 0x9E3779B97F4A7C15 >> 32) & 0xFFFFFFFF)
    assert [random.random() for _ in range(700)] == of_random.random_sample(700).tolist()
    torch.manual_seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    assert after == (
        [*np.random.standard_normal(3), *np.random.rand(700)], torch.rand(700).tolist(), torch.randn(3).tolist()
    )  # fmt: skip


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
            forget_memory(patch)
        assert use(True) == use(False)


@pytest.mark.skipif(sys.implementation.name != "cpython", reason="other Pythons keep the states elsewhere")
@pytest.mark.parametrize("seed", [0, 1, 3, 2**32, 2**63 - 1])
def test_finding_the_generators_leaves_them_as_they_are(seed: int) -> None:
    """Whatever the seed, which may be in other fields of torch's generator too."""
    seed_generators(seed)
    random.gauss(0, 1), np.random.standard_normal(), torch.randn(1)  # each keeps a second number
    before = generator_states()
    assert rng._Python().memory is not None
    assert rng._Numpy().normal is not None
    assert rng._Torch().memory is not None
    after = generator_states()
    assert after["python"] == before["python"]
    assert repr(after["numpy"]) == repr(before["numpy"])
    assert np.array_equal(after["numpy"][1], before["numpy"][1])
    assert torch.equal(after["torch"], before["torch"])


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("by_memory", [True, False])
@pytest.mark.parametrize("name", [None, *USES])
def test_a_change_is_seen(name: str | None, by_memory: bool, kept: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the number drawn is the second of a pair, which the generator kept."""
    if not by_memory:
        forget_memory(monkeypatch)

    def prepare() -> None:
        seed_generators(1)
        if kept:
            np.random.standard_normal(), random.gauss(0, 1), torch.randn(1)

    prepare()
    states = KeptGenerators()
    if name is not None:
        USES[name]()
    assert rng._host().differ_from(states._states) == (name is not None)
    states.restore()
    assert not rng._host().differ_from(states._states)
    prepare()
    expected = [*draws(), random.gauss(0, 1), *np.random.standard_normal(2), *torch.randn(3).tolist()]
    states.restore()
    assert [*draws(), random.gauss(0, 1), *np.random.standard_normal(2), *torch.randn(3).tolist()] == expected


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("count", [1, 2, 311, 312, 313, 623, 624, 625, 1248])
def test_any_number_of_draws_shows(count: int, kept: bool) -> None:
    """After 624 words the generators are at the same place of the next ones."""
    uses: list[Callable[[], object]] = [
        lambda: [random.getrandbits(32) for _ in range(count)],
        lambda: [random.random() for _ in range(count)],
        lambda: np.random.bytes(4 * count),
        lambda: np.random.rand(count),
        lambda: torch.empty(count, dtype=torch.int32).random_(),
        lambda: torch.rand(count, dtype=torch.float64),
        lambda: torch.randn(count),
        lambda: [torch.randn(()) for _ in range(count)],
    ]
    for use in uses:
        seed_generators(count)
        if kept:
            np.random.standard_normal(), random.gauss(0, 1), torch.randn(1)
        states = KeptGenerators()
        use()
        assert rng._host().differ_from(states._states)


def test_reading_while_the_generators_are_watched() -> None:
    assert read_watched(torch.initial_seed) == (torch.initial_seed(), False)
    for use in USES.values():
        assert read_watched(use)[1]

    def fail_by_chance() -> None:
        raise KeyError(random.random())

    def fail() -> None:
        raise KeyError("x")

    assert read_watched(fail_by_chance) == (None, True)
    with pytest.raises(KeyError, match="x"):
        read_watched(fail)


def test_states_are_restored() -> None:
    seed_generators(4)
    states = generator_states()
    expected = draws()
    set_generator_states(states)
    assert draws() == expected


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


@pytest.mark.parametrize("outside", [np.random.MT19937, np.random.PCG64, np.random.Philox, np.random.SFC64])
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


def test_the_generators_are_found_where_tensors_are_fake() -> None:
    with FakeTensorMode():
        found = rng._HostGenerators()
    assert found.reads is not None


def test_the_generators_are_found_while_another_thread_draws() -> None:
    stopped = threading.Event()
    drawn: list[float] = []

    def draw() -> None:
        while not stopped.is_set():
            drawn.append(torch.rand((), dtype=torch.float64).item())

    thread = threading.Thread(target=draw)
    torch.manual_seed(5)
    thread.start()
    for _ in range(30):
        rng._Numpy(), rng._Python()
        rng._torch_memory(torch.default_generator)
    stopped.set()
    thread.join(60)
    torch.manual_seed(5)
    assert drawn == torch.rand(len(drawn), dtype=torch.float64).tolist(), "its numbers were drawn for something else"


def test_another_thread_that_draws_is_waited_for() -> None:
    """Else numpy would read beyond its words there, and end the process."""
    states = KeptGenerators()
    with ThreadPoolExecutor(1) as pool:
        with np.random.get_bit_generator().lock:  # type: ignore[attr-defined]  # as a thread that draws
            written = pool.submit(states.restore)
            with pytest.raises(TimeoutError):
                written.result(timeout=0.1)
        written.result(timeout=60)
