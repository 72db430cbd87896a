"""Training without torch's compiler in memory: it is imported where something compiles, not with the first optimizer.

torch imports `torch._dynamo`, which takes about a second and 70 MB, at the first call of a function that must not be
compiled, such as `Optimizer.add_param_group`, to make a version of it that says so to the compiler. Before that import,
nothing is compiled, and the function itself does the same.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.abc
import inspect
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

_COMPILER = "torch._dynamo"
_VERSION = "__dynamo_disable"
"""Attribute of a function in which torch keeps its version for the compiler."""

_keep_from_compiler = getattr(torch, "_disable_dynamo", None)  # private: another release may lack it
_CODE_OF_KEPT = None if _keep_from_compiler is None else _keep_from_compiler(lambda: None).__code__


def call_as_is(*wrapped: Callable[..., Any] | None) -> None:
    """Let functions that torch keeps from its compiler run without it, until it is imported.

    Args:
        wrapped: Functions decorated by `torch._disable_dynamo`, and maybe by others on top; others, and None, are left
            alone.
    """
    if _COMPILER in sys.modules or _CODE_OF_KEPT is None:
        return
    for each in filter(None, wrapped):
        kept = inspect.unwrap(each, stop=lambda layer: getattr(layer, "__code__", None) is _CODE_OF_KEPT)
        function = getattr(kept, "__wrapped__", None)
        if function is not None and not hasattr(function, _VERSION):
            setattr(function, _VERSION, function)
            _watch.functions.append(function)


@contextlib.contextmanager
def ddp_without_compiler() -> Iterator[None]:
    """Create a DistributedDataParallel in the context: it asks the compiler whether to exchange gradients by it.

    Only who has imported the compiler can have set that.
    """
    if _COMPILER in sys.modules or _CODE_OF_KEPT is None:
        yield
        return
    torch._dynamo = _DefaultSettings()  # type: ignore[assignment]
    try:
        yield
    finally:
        _drop_stand_in()


class _DefaultSettings:
    """Stands for the compiler in what DistributedDataParallel asks; imports it for anything else."""

    utils = types.SimpleNamespace(get_optimize_ddp_mode=lambda: "ddp_optimizer")

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(_COMPILER), name)


def _drop_stand_in() -> None:
    if isinstance(vars(torch).get("_dynamo"), _DefaultSettings):
        del torch._dynamo


class _CompilerImport(importlib.abc.MetaPathFinder):
    """Finds no module; gives torch back as it was when the compiler is imported, or looked for.

    Attributes:
        functions: Those that stand for their own version.
    """

    def __init__(self) -> None:
        self.functions: list[Any] = []

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> None:
        if fullname == _COMPILER:
            _drop_stand_in()
            while self.functions:
                delattr(self.functions.pop(), _VERSION)


_watch = _CompilerImport()
sys.meta_path.insert(0, _watch)
