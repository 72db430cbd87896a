"""Modes and buffers of modules, which a context restores."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


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
def buffers_aside(module: torch.nn.Module) -> Iterator[None]:
    """Replace a module's buffers by copies, and restore the originals on exit."""
    kept = [(each, name, buffer) for each in module.modules() for name, buffer in each._buffers.items()]
    for each, name, buffer in kept:
        each._buffers[name] = None if buffer is None else buffer.clone()
    try:
        yield
    finally:
        for each, name, buffer in kept:
            each._buffers[name] = buffer
