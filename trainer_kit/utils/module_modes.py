"""Modes and state of modules, which a context restores."""

from __future__ import annotations

import contextlib
import copy
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch

from trainer_kit.utils.generators import is_generator, set_state_of_generator, state_of_generator

_CONTAINERS = (dict, OrderedDict, defaultdict, Counter, list, deque, set)


@contextlib.contextmanager
def evaluating(model: torch.nn.Module) -> Iterator[None]:
    """Set evaluation mode, and restore each module's mode on exit (some may be in evaluation mode already).

    A module's own `train` is called for both: it may drop cached weights, or merge and split those of an adapter.
    """
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            if module.training is not mode and _has_own_train(module):
                module.train(mode)
        for module, mode in modes:  # a module's own `train` may have changed those of others
            if module.training is not mode:
                module.training = mode


def _has_own_train(module: torch.nn.Module) -> bool:
    return getattr(module.train, "__func__", None) is not torch.nn.Module.train


@contextlib.contextmanager
def state_aside(model: torch.nn.Module) -> Iterator[None]:
    """Restore on exit what passes may have changed in a model; buffers are copies in the meantime.

    That is what its modules hold: buffers, other tensors, arrays and random generators with their contents, also in
    lists, tuples, sets and dicts; numbers and other objects in attributes; hooks and modules, since attributes may say
    that they are there. Parameters and other objects keep what has changed in them.
    """
    buffers = [(module._buffers, dict(module._buffers.items())) for module in model.modules()]
    undo: list[Callable[[], object]] = []
    seen = {id(registry) for registry, _ in buffers}
    for module in model.modules():
        _remember(vars(module), undo, seen)
    copies: dict[int, torch.Tensor] = {}
    try:
        for registry, before in buffers:
            for name, buffer in before.items():
                if buffer is not None:  # not all kernels count their changes in its version
                    registry[name] = copies.setdefault(id(buffer), buffer.clone())
        yield
    finally:
        for registry, before in buffers:
            for name in {*registry.keys()} - before.keys():
                del registry[name]
            for name, buffer in before.items():
                registry[name] = buffer
        for each in undo:
            each()


def _remember(value: Any, undo: list[Callable[[], object]], seen: set[int]) -> None:
    """Add to `undo` what restores the contents of a value; `seen` has the identities of those before."""
    if id(value) in seen or isinstance(value, torch.nn.Parameter):
        return
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        if not value.is_inference():
            undo.append(partial(_refill, value, value._version, value.detach().clone()))
    elif is_generator(value):
        undo.append(partial(set_state_of_generator, value, state_of_generator(value)))
    elif isinstance(value, np.ndarray):
        undo.append(partial(np.copyto, value, value.copy()))
    elif type(value) in _CONTAINERS or isinstance(value, tuple):
        if not isinstance(value, tuple):
            undo.append(partial(_reset, value, copy.copy(value)))
        for each in [*value.values()] if isinstance(value, dict) else value:
            _remember(each, undo, seen)


def _refill(tensor: torch.Tensor, version: int, content: torch.Tensor) -> None:
    if tensor._version != version:
        with torch.no_grad():
            tensor.copy_(content)


def _reset(holder: Any, before: Any) -> None:
    """Restore the entries of a dict, list, deque or set, if they are others now."""
    if _entries(holder) != _entries(before):
        holder.clear()
        (holder.extend if isinstance(holder, (list, deque)) else holder.update)(before)


def _entries(holder: Any) -> list[tuple[Any, int]]:
    """Return keys and identities of the entries, in order."""
    return [(key, id(each)) for key, each in (holder.items() if isinstance(holder, dict) else enumerate(holder))]
