"""What functions hold: in their closure, their defaults, and the globals that their code reads."""

from __future__ import annotations

import dis
import functools
import types
from collections.abc import Iterator
from itertools import chain
from typing import Any


def held_by(function: types.FunctionType) -> Iterator[tuple[Any, Any]]:
    """Yield what a function's closure and defaults hold, with names or places."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        if cell != types.CellType():  # an empty one raises when it is read
            yield name, cell.cell_contents
    yield from enumerate(function.__defaults__ or ())
    yield from (function.__kwdefaults__ or {}).items()


def globals_of(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield the globals that a function's code reads, with names; None for one that does not exist."""
    return ((name, function.__globals__.get(name)) for name in _global_names(function.__code__))


@functools.cache
def _global_names(code: types.CodeType) -> tuple[str, ...]:
    """Return the global names that a function's code reads, that of functions within it included."""
    names = {each.argval: None for each in dis.get_instructions(code) if each.opname == "LOAD_GLOBAL"}
    inner = chain.from_iterable(_global_names(each) for each in code.co_consts if isinstance(each, types.CodeType))
    return (*names, *inner)
