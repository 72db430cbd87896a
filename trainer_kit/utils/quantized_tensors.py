"""Tensors of torchao that hold several others, as plain dicts of tensors that checkpoints can keep."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import torch

_CLASS = "trainer_kit.class"
"""Key of the class of a tensor in the dict that `to_plain` makes of it."""

_PACKAGE = "torchao"


def is_quantized(value: Any) -> bool:
    """Return whether a value is a tensor of torchao."""
    return isinstance(value, torch.Tensor) and type(value).__module__.partition(".")[0] == _PACKAGE


def parts_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors that a tensor consists of: itself, or those inside one of torchao, which share its memory."""
    if not is_quantized(tensor):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    return [part for name in names for part in parts_of(getattr(tensor, name))]


def to_plain(tree: Any) -> Any:
    """Replace each tensor of torchao in nested dicts and lists by a dict of the tensors inside it, which share memory.

    The inverse is `from_plain`. Other values are kept.
    """
    if is_quantized(tree):
        names, context = tree.__tensor_flatten__()
        kind = type(tree)
        parts = {name: to_plain(getattr(tree, name)) for name in names}
        return {_CLASS: f"{kind.__module__}.{kind.__qualname__}", "tensors": parts, "context": context}
    if type(tree) in (dict, list):
        items = tree.items() if type(tree) is dict else enumerate(tree)
        made = {key: to_plain(value) for key, value in items}
        return made if type(tree) is dict else [*made.values()]
    return tree


def from_plain(tree: Any) -> Any:
    """Restore what `to_plain` replaced.

    Raises:
        ImportError: If torchao, or its class, is missing.
        ValueError: If `to_plain` did not make a dict that looks like it.
    """
    if isinstance(tree, Mapping) and _CLASS in tree:
        parts = {name: from_plain(value) for name, value in tree["tensors"].items()}
        return _class(tree[_CLASS]).__tensor_unflatten__(parts, tree["context"], None, None)
    if type(tree) is dict:
        return {key: from_plain(value) for key, value in tree.items()}
    if type(tree) is list:
        return [from_plain(value) for value in tree]
    return tree


def _class(path: str) -> Any:
    """Return a class of torchao; a checkpoint must not have any other code imported."""
    module, _, name = path.rpartition(".")
    found: Any = None
    if module.partition(".")[0] == _PACKAGE:
        found = getattr(importlib.import_module(module), name, None)
    if not isinstance(found, type) or not issubclass(found, torch.Tensor):
        raise ValueError(f"{path!r:.80} is no tensor class of {_PACKAGE}")
    return found
