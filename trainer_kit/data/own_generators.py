"""`OwnGenerators`: the random generators that a dataset, its transforms or a collator keep for themselves."""

from __future__ import annotations

import contextlib
import functools
import os
import random
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset
from xxhash import xxh3_64_intdigest

from trainer_kit.data.sampling import mix
from trainer_kit.utils.functions import globals_of, held_by
from trainer_kit.utils.generators import is_generator, is_global_generator

_STDLIB = os.path.dirname(os.__file__)
_LEAVES = (str, bytes, int, float, complex, type, type(None), types.ModuleType, torch.Tensor, np.ndarray)
_LONGEST = 100
"""Longest list or dict to look through: a longer one holds data, unless it is a list of datasets."""
_DEEPEST = 16
"""Deepest level to look at; pipelines nest: each has its steps in a list, below the format of a dataset."""
_MOST = 2_000
"""Largest number of objects to look at."""


class OwnGenerators:
    """Random generators that objects and functions hold, which `find` finds and `seed` seeds like the global ones.

    They are looked for in attributes, of classes and in slots too, short lists, deques and dicts, lists of datasets,
    arguments of `functools.partial`, closures, and in the global names that functions and methods use. A generator that
    an installed package keeps as a global name is left alone.

    Args:
        owners: Datasets and collators.
    """

    def __init__(self, *owners: Any) -> None:
        self._owners = owners
        self._found: list[tuple[int, Any]] = []

    def __bool__(self) -> bool:
        return bool(self._found)

    def find(self) -> bool:
        """Look for the generators: at first, and where a dataset's `set_epoch` or a first draw may have made others.

        Returns:
            Whether there are others than before.
        """
        before = {id(generator) for _, generator in self._found}
        owners = [(f"/{number}", owner) for number, owner in enumerate(self._owners)]
        self._found = [
            (xxh3_64_intdigest(path.encode(errors="replace")), generator) for path, generator in held_generators(owners)
        ]
        return any(id(generator) not in before for _, generator in self._found)

    def seed(self, value: int) -> None:
        """Seed each generator by a value and by where it was found, so that no two give the same numbers."""
        for place, generator in self._found:
            _seed(generator, mix(value, place))


def held_generators(
    owners: Iterable[tuple[str, Any]],
    deepest: int = _DEEPEST,
    is_left_out: Callable[[Any], bool] = lambda value: False,
) -> Iterator[tuple[str, Any]]:
    """Yield the generators that can be reached from objects, each once, nearest first, with its path.

    Args:
        owners: The objects, with the paths to them.
        deepest: Number of levels to look at, from the objects themselves.
        is_left_out: Whether to look for no generators in an object.
    """
    level = [*owners]
    seen: set[int] = set()
    for _ in range(deepest):
        below: list[tuple[str, Any]] = []
        for path, value in level:
            if type(value) in _LEAVES or id(value) in seen:
                continue
            seen.add(id(value))
            if len(seen) > _MOST:
                return
            found = False
            with contextlib.suppress(Exception):  # of the user's objects, such as a reference to what is gone
                if isinstance(value, _LEAVES) or is_left_out(value):
                    continue
                found = is_generator(value)
                below += [] if found else [(f"{path}/{name}", part) for name, part in _parts(value)]
            if found and not is_global_generator(value):
                yield path, value
        level = below


def _seed(generator: Any, value: int) -> None:
    if isinstance(generator, random.Random):
        generator.seed(value)
    elif isinstance(generator, torch.Generator):
        generator.manual_seed(value)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = type(generator.bit_generator)(value).state
    else:
        kind = generator.get_state(legacy=False)["bit_generator"]
        generator.set_state(getattr(np.random, kind)(value).state)


def _parts(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield what an object holds, with names."""
    if isinstance(value, dict):
        yield from _named(value) if len(value) <= _LONGEST else ()
    elif isinstance(value, (list, tuple, deque)):
        yield from enumerate(value) if len(value) <= _LONGEST or isinstance(value[0], Dataset) else ()
    elif isinstance(value, functools.partial):
        yield from (("func", value.func), ("args", value.args), ("keywords", value.keywords))
    elif isinstance(value, types.MethodType):
        yield from (("self", value.__self__), ("func", value.__func__))
    elif isinstance(value, types.FunctionType):
        yield from _of_function(value)
    else:
        yield from _named(getattr(value, "__dict__", {}))
        yield from _of_class(value)
        yield from chain.from_iterable(map(_of_function, _methods(value.__class__)))


def _named(values: Mapping[Any, Any]) -> Iterator[tuple[Any, Any]]:
    return ((key if isinstance(key, str) else place, each) for place, (key, each) in enumerate(values.items()))


def _of_class(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield what an object holds in slots, and the generators that its classes hold for all their objects."""
    for name, member in chain.from_iterable(vars(base).items() for base in value.__class__.__mro__):
        if isinstance(member, types.MemberDescriptorType):
            with contextlib.suppress(AttributeError):  # an empty slot; `getattr` would call a `__getattr__`
                yield name, member.__get__(value, type(value))
        elif is_generator(member):
            yield name, member


def _of_function(function: types.FunctionType) -> Iterator[tuple[Any, Any]]:
    """Yield what a function holds: defaults, its closure, and the globals that it uses of its own module."""
    yield from held_by(function)
    for name, value in () if _is_installed(function.__code__.co_filename) else globals_of(function):
        if is_generator(value) or (isinstance(value, types.FunctionType) and value.__globals__ is function.__globals__):
            yield name, value


@functools.cache
def _methods(cls: type) -> tuple[types.FunctionType, ...]:
    """Return the functions of a class and its bases."""
    members = chain.from_iterable(vars(base).values() for base in cls.__mro__)
    functions = (getattr(member, "__func__", member) for member in members)  # of class methods and static methods
    return tuple(each for each in functions if isinstance(each, types.FunctionType))


@functools.cache
def _is_installed(file: str) -> bool:
    """Return whether a source file belongs to Python or to an installed package."""
    return file.startswith((_STDLIB, "<frozen")) or not {"site-packages", "dist-packages"}.isdisjoint(Path(file).parts)
