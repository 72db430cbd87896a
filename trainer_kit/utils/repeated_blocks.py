"""The blocks that a model repeats, such as the layers of a transformer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain

from torch import nn


def repeated_blocks(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the children of each outermost `ModuleList` or `Sequential` of at least two modules of one class.

    Args:
        module: The model. Its blocks have parameters and a forward pass.
    """
    return _outermost(module, _blocks_of_list)


def blocks_in_rows(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the blocks in each outermost list of at least two lists of the same classes, as `[attention, mlp]`.

    Args:
        module: The model. The inner lists are never called, but their modules are.
    """
    return _outermost(module, _blocks_of_rows)


def _outermost(module: nn.Module, blocks_of: Callable[[nn.Module], list[nn.Module]]) -> Iterator[nn.Module]:
    """Yield the blocks of each outermost module that has some."""
    if blocks := blocks_of(module):
        yield from blocks
        return
    for child in module.children():
        yield from _outermost(child, blocks_of)


def _blocks_of_list(module: nn.Module) -> list[nn.Module]:
    children = [*module.children()]
    is_list = isinstance(module, (nn.ModuleList, nn.Sequential)) and len(children) > 1
    return children if is_list and len({*map(type, children)}) == 1 and all(map(can_be_block, children)) else []


def _blocks_of_rows(module: nn.Module) -> list[nn.Module]:
    children = [*module.children()] if isinstance(module, nn.ModuleList) else []
    rows = [[*child] for child in children if type(child) is nn.ModuleList]
    if not 1 < len(children) == len(rows) or len({tuple(map(type, row)) for row in rows}) > 1:
        return []
    return [*dict.fromkeys(filter(can_be_block, chain.from_iterable(rows)))]


def can_be_block(module: nn.Module) -> bool:
    """Return whether a module has parameters and a forward pass."""
    return type(module).forward is not nn.Module.forward and next(module.parameters(), None) is not None
