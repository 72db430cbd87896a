"""Modes and buffers of modules, which a context restores."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def evaluating(model: torch.nn.Module) -> Iterator[None]:
    """Set evaluation mode, and restore each module's mode on exit (some may be in evaluation mode already)."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


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
