from __future__ import annotations

import dataclasses
import functools
import random
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from trainer_kit.data.own_generators import OwnGenerators

rng = np.random.default_rng(0)
unused = np.random.default_rng(0)


def helper() -> float:
    return float(rng.random())


class Holder:
    def __init__(self, **held: Any) -> None:
        self.__dict__ |= held

    def method(self) -> None: ...


class UsesGlobal:
    def __getitem__(self, index: int) -> float:
        return sum(rng.random() for _ in range(2))


class UsesHelper:
    unused = 3  # an attribute with the name of a global

    def __getitem__(self, index: int) -> float:
        return helper() + self.unused


class Slots:
    __slots__ = ("__rng", "unset")

    def __init__(self, rng: Any) -> None:
        self.__rng = rng


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    transform: Any


class UsesNothing: ...


class Read(torch.utils.data.Dataset[Any]):
    def __init__(self, rng: Any) -> None:
        self.rng = rng

    def __len__(self) -> int:
        return 1


def closure() -> Callable[[], float]:
    own = random.Random(0)
    return lambda: own.random()


def found(*owners: Any) -> list[Any]:
    generators = OwnGenerators(*owners)
    generators.find()
    return [generator for _, generator in generators._found]


KINDS: dict[str, Callable[[], Any]] = {
    "python": lambda: random.Random(1),
    "torch": lambda: torch.Generator().manual_seed(1),
    "numpy": lambda: np.random.default_rng(1),
    "philox": lambda: np.random.Generator(np.random.Philox(1)),
    "old": lambda: np.random.RandomState(1),
    "old pcg": lambda: np.random.RandomState(np.random.PCG64(1)),
}


def draw(generator: Any) -> float:
    if isinstance(generator, torch.Generator):
        return torch.rand((), generator=generator, dtype=torch.float64).item()
    return float(generator.random() if hasattr(generator, "random") else generator.random_sample())


@pytest.mark.parametrize("kind", KINDS)
def test_a_generator_is_seeded(kind: str) -> None:
    own = KINDS[kind]()
    generators = OwnGenerators(Holder(rng=own))
    assert generators.find()
    assert not generators.find()
    drawn = []
    for value in (5, 6, 5, 2**63 - 1):
        generators.seed(value)
        drawn.append((draw(own), draw(own)))
    assert drawn[0] == drawn[2]
    assert len(set(drawn)) == 3


@pytest.mark.parametrize(
    "place",
    [
        lambda own: Holder(transform=Holder(steps=[len, {"noise": own}])),
        lambda own: functools.partial(len, own),
        lambda own: Holder(transform=functools.partial(Holder, generator=own)),
        lambda own: Holder(rng=own).method,
        lambda own: lambda: own,
        lambda own, kept=None: lambda kept=own: kept,
        lambda own: torch.utils.data.Subset(Holder(rng=own), [0]),  # type: ignore[arg-type]
        lambda own: torch.nn.Sequential(_noise(own)),
        lambda own: Slots(own),
        lambda own: Frozen(transform=Slots(own)),
        lambda own: type("Shared", (UsesNothing,), {"rng": own})(),
        lambda own: deque([len, own], maxlen=3),
        lambda own: torch.utils.data.ConcatDataset([Read(own) for _ in range(120)]),
    ],
)
def test_where_a_generator_is_found(place: Callable[[Any], Any]) -> None:
    own = random.Random(1)
    assert found(place(own)) == [own]


def test_the_generators_of_nested_pipelines_are_found() -> None:
    """albumentations' `Compose` and each of its transforms have their own, and `datasets` keeps it in its format."""
    owns = [random.Random(each) for each in range(4)]
    pipeline = Holder(rng=owns[-1])
    for own in owns[-2::-1]:
        pipeline = Holder(rng=own, transforms=[len, pipeline])
    dataset = Holder(_format_kwargs={"transform": functools.partial(len, transform=pipeline)})
    assert found(torch.utils.data.Subset(dataset, [0])) == owns  # type: ignore[arg-type]


def _noise(own: Any) -> torch.nn.Module:
    module = torch.nn.Identity()
    module.rng = own
    return module


@pytest.mark.parametrize("owner", [UsesGlobal(), UsesHelper(), helper, Holder(transform=helper)])
def test_a_global_that_the_scripts_code_uses_is_found(owner: Any) -> None:
    assert found(owner) == [rng]


def test_a_closure_is_found() -> None:
    assert len(found(closure())) == 1


def test_each_is_found_once() -> None:
    own = random.Random(1)
    assert found(Holder(a=own, b=[own]), Holder(c=own)) == [own]


@pytest.mark.parametrize(
    "owner",
    [
        Holder(rng=random.SystemRandom()),
        random.choice,
        Holder(rng=np.random.mtrand._rand, other=torch.default_generator),
        Holder(samples=[random.Random(1)] * 101),  # data, not settings
        [],
        None,
        object(),
        type,
    ],
)
def test_what_is_left_alone(owner: Any) -> None:
    assert found(owner) == []


@pytest.mark.parametrize(
    ("folder", "number"), [("/x/site-packages", 0), ("/usr/lib/python3/dist-packages", 0), ("/x", 1)]
)
def test_a_global_of_a_package_is_left_alone(folder: str, number: int) -> None:
    names: dict[str, Any] = {"rng": random.Random(1)}
    exec(compile("def collate(samples): return rng.random()", f"{folder}/module.py", "exec"), names)
    assert len(found(names["collate"])) == number


def test_two_generators_differ() -> None:
    first, second = np.random.default_rng(1), np.random.default_rng(1)
    generators = OwnGenerators(Holder(first=first, second=second))
    generators.find()
    generators.seed(5)
    assert draw(first) != draw(second)


def test_another_generator_does_not_change_the_numbers_of_the_first() -> None:
    """A generator that is made later must not shift the seeds of the others."""
    drawn = []
    for more in ({}, {"a": random.Random(1)}):
        own = random.Random(2)
        generators = OwnGenerators(Holder(**more, rng=own))
        generators.find()
        generators.seed(5)
        drawn.append(draw(own))
    assert drawn[0] == drawn[1]


def test_objects_that_refer_to_each_other() -> None:
    first, second = Holder(rng=random.Random(1)), Holder()
    first.other, second.other = second, first  # type: ignore[attr-defined]
    assert len(found(first, second)) == 1


def test_a_generator_that_is_made_later() -> None:
    owner = Holder()
    generators = OwnGenerators(owner)
    assert not generators.find()
    assert not generators
    owner.rng = random.Random(1)  # type: ignore[attr-defined]
    assert generators.find()
    assert generators
    owner.rng = random.Random(1)  # type: ignore[attr-defined]
    assert generators.find()


def test_an_empty_closure() -> None:
    def outer() -> Callable[[], Any]:
        def inner() -> Any:
            return late

        if random.random() < 2:
            return inner
        late = 1
        return inner

    assert found(outer()) == []
