"""Modules of a model by patterns of their names or class names."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterator

from torch import nn


def outermost_matches(
    model: nn.Module, pattern: str, is_candidate: Callable[[nn.Module], bool]
) -> dict[str, nn.Module]:
    """Return the modules that match a pattern, by name, without those inside another one that matches.

    Args:
        model: Model; it never matches itself.
        pattern: Pattern (`fnmatch`) of names or class names.
        is_candidate: Whether a module that matches counts.
    """
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        is_match = fnmatch.fnmatchcase(name, pattern) or fnmatch.fnmatchcase(type(module).__name__, pattern)
        if name and is_match and is_candidate(module) and not any(outer in found for outer in prefixes(name)):
            found[name] = module
    return found


def prefixes(name: str) -> Iterator[str]:
    """Yield the names of the modules around this name, innermost first, without the root's."""
    while name := name.rpartition(".")[0]:
        yield name
