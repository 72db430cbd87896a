"""Modes and state of modules, which a context restores."""

from __future__ import annotations

import contextlib
import copy
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from trainer_kit.utils.generators import is_generator


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
    """Replace what passes may change in a model by copies, and restore the originals on exit.

    Copied are buffers, and tensors, arrays and random generators that modules hold as attributes, also in lists, tuples
    and dicts. Parameters and other objects are not; an attribute that is set gets its former object back.
    """
    kept: list[tuple[Any, dict[str, Any]]] = []
    for module in model.modules():
        kept.append((module._buffers, dict(module._buffers.items())))
        kept.append((vars(module), {name: value for name, value in vars(module).items() if name not in _OF_TORCH}))
    copies: dict[int, Any] = {}
    try:
        for holder, before in kept:
            for name, value in before.items():
                holder[name] = _copied(value, copies)
        yield
    finally:
        for holder, before in kept:
            for name in set(holder.keys()).difference(before, _OF_TORCH):
                del holder[name]
            for name, value in before.items():
                holder[name] = value


def _copied(value: Any, copies: dict[int, Any]) -> Any:
    """Return a copy of a module's state; `copies` has those made already, by the identity of the original."""
    if id(value) in copies:
        return copies[id(value)]
    kind, result = type(value), value
    if isinstance(value, torch.Tensor):
        result = value if isinstance(value, torch.nn.Parameter) else value.clone()
    elif is_generator(value):
        result = copy.deepcopy(value)
    elif kind in (set, np.ndarray):
        result = copy.copy(value)
    elif kind is tuple or (isinstance(value, tuple) and hasattr(value, "_fields")):
        items = [_copied(item, copies) for item in value]
        result = kind(items) if kind is tuple else kind(*items)
    elif kind in _CONTAINERS:
        result = copies[id(value)] = copy.copy(value)
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            result[key] = _copied(item, copies)
    copies[id(value)] = result
    return result


_OF_TORCH = vars(torch.nn.Module()).keys()
_CONTAINERS = (list, deque, dict, OrderedDict, defaultdict, Counter)
