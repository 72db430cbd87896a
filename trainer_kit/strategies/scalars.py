"""Conversion of one-element tensors, arrays and numpy scalars to plain numbers."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Real
from typing import Any, TypeVar

import torch

from trainer_kit.strategies.base import Strategy

Key = TypeVar("Key")

PLAIN = (int, float, bool)
"""Types of plain numbers, without subclasses such as `numpy.float64`."""


def as_scalar(name: str, value: Any) -> bool | int | float | torch.Tensor:
    """Return `value` as a Python number, or as a scalar tensor if it is on a device other than the CPU.

    Args:
        name: Name of the value, for the error.
        value: Number, or tensor or array of one element.

    Raises:
        TypeError: If `value` is no real number.
    """
    if type(value) in PLAIN:
        return value  # type: ignore[no-any-return]
    if isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_complex():
        return value.detach().reshape(()) if value.device.type != "cpu" else value.item()
    found = value
    if hasattr(value, "item") and getattr(value, "size", None) == 1:  # numpy, and libraries with its interface
        found = value.item()
    if isinstance(found, (bool, int)):
        return int(found) if type(found) is not bool else found
    if isinstance(found, Real):
        return float(found)
    raise TypeError(
        f"{name!r} is {_described(value)}; give a number, or a tensor or an array of one element, or leave it out"
    )


def read_scalars(values: Mapping[Key, Any], strategy: Strategy) -> dict[Key, Any]:
    """Return `values` with scalar tensors replaced by numbers; waits for the device once per dtype and device."""
    groups: dict[tuple[torch.device, torch.dtype], list[Key]] = {}
    for name, value in values.items():
        if isinstance(value, torch.Tensor) and value.ndim == 0:
            groups.setdefault((value.device, value.dtype), []).append(name)
    read: dict[Key, Any] = {}
    for names in groups.values():
        read |= zip(names, strategy.collectives.read_scalars([values[name] for name in names]), strict=True)
    return {name: read.get(name, value) for name, value in values.items()}


def _described(value: Any) -> str:
    if isinstance(value, torch.Tensor) or hasattr(value, "shape"):
        return f"a {type(value).__name__} of shape {tuple(value.shape)} and type {value.dtype}"
    shown = repr(value)
    return f"{shown if len(shown) <= 80 else shown[:77] + '...'}, a {type(value).__name__}"
