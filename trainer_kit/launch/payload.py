"""`Sent`: a function on its way to other processes, also one that was defined in a notebook's cell."""

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
    """What each process calls in place of the user's function; only the value of rank 0 goes back.

    Args:
        function: The user's.
        args: Its arguments.
        pickled: Whether the processes are fresh ones, which know nothing of the notebook; forked ones know it all.

    Raises:
        ImportError: If cloudpickle is needed and not installed.
        TypeError: If some object is needed that cannot be pickled, naming it and the way to it.
    """

    def __init__(self, function: Callable[..., Any], args: Sequence[Any], pickled: bool) -> None:
        self.__name__ = name_of(function)
        self._pickled = pickled
        self._work: Any = _packed(function, args) if pickled else (function, tuple(args))
        # The text of cells, for tracebacks.
        self._sources = {name: entry for name, entry in linecache.cache.items() if pickled and entry[1:2] == (None,)}

    def __call__(self) -> Any:
        """Calls the function."""
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(line_buffering=True)
        threads = os.environ.get("OMP_NUM_THREADS", "")
        if threads.isdecimal() and int(threads) > 0:
            torch.set_num_threads(int(threads))  # a forked process does not read the variable again
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
        """The function's value, from what a process gave back."""
        return pickle.loads(returned) if self._pickled and returned is not None else returned


class PlainStreams:
    """While it exists, forked processes write to the standard file descriptors and not into the notebook's streams.

    The kernel shows what arrives at its descriptors. Its own streams would send each piece of a line by itself, so that
    the lines of several processes are mixed, and know nothing of a redirection to a file.
    """

    def __init__(self) -> None:
        multiprocessing.util.register_after_fork(self, PlainStreams._install)

    def _install(self) -> None:
        sys.stdout, sys.stderr = (
            os.fdopen(descriptor, "w", encoding="utf-8", errors="backslashreplace", closefd=False)
            for descriptor in (1, 2)
        )


def name_of(function: Callable[..., Any]) -> str:
    """What to call a function in a sentence."""
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
    except Exception as error:  # an object's own code raises what it likes
        way, culprit = _culprit(function, args)
        raise TypeError(
            f"{name_of(function)}() cannot be sent to other processes, because {way}, a "
            f"{type(culprit).__module__}.{type(culprit).__qualname__}, cannot be pickled ({error}); make it inside the "
            "function, or restart the kernel and call notebook_launcher first"
        ) from error


def _culprit(function: Callable[..., Any], args: Sequence[Any]) -> tuple[str, Any]:
    """The way to the innermost object that cannot be pickled, in words, and that object."""
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
    except Exception:  # whatever it is, it is what was looked for
        return True
    return False


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """What an object is made of, by name."""
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
    """Names that a function and those inside it look up."""
    inner = (_names(constant) for constant in code.co_consts if isinstance(constant, types.CodeType))
    return set(code.co_names).union(*inner)
