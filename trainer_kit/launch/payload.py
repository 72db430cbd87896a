"""`Sent`: a function in a form for other processes, even if a notebook's cell defines it."""

from __future__ import annotations

import functools
import importlib
import io
import linecache
import multiprocessing.util
import os
import pickle
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from trainer_kit.config import environment
from trainer_kit.launch.notebook_state import show_from_child


class Sent:
    """The callable of each process in place of the user's function; only rank 0 returns the value.

    Args:
        function: The user's function.
        args: Arguments of the function.
        pickled: Whether the processes start afresh and need a pickle; forked processes share the notebook's objects.

    Raises:
        ImportError: If cloudpickle is needed and not installed.
        TypeError: If a needed object cannot be pickled; the message names it and the path to it.
    """

    def __init__(self, function: Callable[..., Any], args: Sequence[Any], pickled: bool) -> None:
        self.__name__ = name_of(function)
        self._pickled = pickled
        self._work: Any = _packed(function, args) if pickled else (function, tuple(args))
        # Source code of cells, for tracebacks.
        self._sources = {name: entry for name, entry in linecache.cache.items() if pickled and entry[1:2] == (None,)}

    def __call__(self) -> Any:
        """Call the function."""
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(line_buffering=True)
        threads = os.environ.get("OMP_NUM_THREADS", "")
        if threads.isdecimal() and int(threads) > 0:
            torch.set_num_threads(int(threads))  # a forked process does not reread the variable
        linecache.cache.update(self._sources)
        is_main = environment.place().rank == 0
        if not self._pickled:
            show_from_child(is_main)
        function, args = pickle.loads(self._work) if self._pickled else self._work
        value = function(*args)
        if not is_main:
            return None
        return _cloudpickle().dumps(value) if self._pickled else value

    def value(self, returned: Any) -> Any:
        """Return the function's value from the returned object of a process.

        Args:
            returned: Object that rank 0 returned; None if it ran on another machine.
        """
        return pickle.loads(returned) if self._pickled and returned is not None else returned


class PlainStreams:
    """Makes forked processes write to the standard file descriptors instead of the notebook's streams, while it exists.

    The kernel shows what arrives at its descriptors. Its own streams would send each piece of a line separately, which
    mixes the lines of several processes, and would ignore a redirection to a file.
    """

    def __init__(self) -> None:
        multiprocessing.util.register_after_fork(self, PlainStreams._install)

    def _install(self) -> None:
        sys.stdout, sys.stderr = (
            os.fdopen(descriptor, "w", encoding="utf-8", errors="backslashreplace", closefd=False)
            for descriptor in (1, 2)
        )


def name_of(function: Callable[..., Any]) -> str:
    """Return the name of a function for messages."""
    return getattr(function, "__name__", None) or type(function).__name__


def _cloudpickle() -> Any:
    try:
        return importlib.import_module("cloudpickle")
    except ImportError as error:
        raise ImportError(
            "a notebook's functions are sent to fresh processes by cloudpickle; run `pip install cloudpickle`"
        ) from error


def _packed(function: Callable[..., Any], args: Sequence[Any]) -> bytes:
    try:
        return bytes(_cloudpickle().dumps((function, tuple(args))))
    except ImportError:
        raise
    except Exception as error:  # an object's own code may raise any error
        way, culprit = _culprit(function, args)
        raise TypeError(
            f"{name_of(function)}() cannot be sent to other processes, because {way}, a "
            f"{type(culprit).__module__}.{type(culprit).__qualname__}, cannot be pickled ({error}); make it inside the "
            "function, or restart the kernel and call notebook_launcher first"
        ) from error


def _culprit(function: Callable[..., Any], args: Sequence[Any]) -> tuple[str, Any]:
    """Return the path to the innermost object that cannot be pickled, in words, and that object."""
    parts = [("the function", function), *((f"argument {number}", arg) for number, arg in enumerate(args))]
    way: list[str] = []
    seen: set[int] = set()
    value: Any = function
    while True:
        part = next(((name, part) for name, part in parts if id(part) not in seen and _fails(part)), None)
        if part is None:
            return " of ".join(reversed(way)), value
        name, value = part
        if value is not function:
            way.append(name)
        seen.add(id(value))
        parts = list(_parts(value))


def _fails(value: Any) -> bool:
    try:
        _cloudpickle().dumps(value)
    except Exception:  # any error means that it cannot be pickled
        return True
    return False


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the parts of an object, with names."""
    if isinstance(value, types.FunctionType):
        for name in sorted(_names(value.__code__) & value.__globals__.keys()):
            yield f"the global `{name}`", value.__globals__[name]
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            yield f"the variable `{name}`", cell.cell_contents
        for default in (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()):
            yield "a default value", default
    elif isinstance(value, types.MethodType):
        yield "its object", value.__self__
    elif isinstance(value, functools.partial):
        yield "its function", value.func
        yield from ((f"argument {number}", part) for number, part in enumerate(value.args))
        yield from ((f"argument `{name}`", part) for name, part in value.keywords.items())
    elif isinstance(value, dict):
        yield from ((f"the entry {key!r}", part) for key, part in value.items())
    elif isinstance(value, (list, tuple, set, frozenset)):
        yield from ((f"element {number}", part) for number, part in enumerate(value))
    else:
        yield from ((f"the attribute `{name}`", part) for name, part in dict(getattr(value, "__dict__", {})).items())


def _names(code: types.CodeType) -> set[str]:
    """Return the names that a function and its inner functions look up."""
    inner = (_names(constant) for constant in code.co_consts if isinstance(constant, types.CodeType))
    return set(code.co_names).union(*inner)
