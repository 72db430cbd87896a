"""The blocks that a model repeats, such as the layers of a transformer."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from torch import nn


def repeated_blocks(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the children of each outermost `ModuleList` or `Sequential` of at least two modules of one class.

    Args:
        module: The model. Its blocks have parameters and a forward pass.
    """
    children = [*module.children()]
    is_list = isinstance(module, (nn.ModuleList, nn.Sequential))
    if is_list and len(children) > 1 and len(set(map(type, children))) == 1 and all(map(can_be_block, children)):
        yield from children
        return
    for child in children:
        yield from repeated_blocks(child)


def blocks_in_rows(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the blocks in each outermost list of at least two lists of the same classes, as `[attention, mlp]`.

    Args:
        module: The model. The inner lists are never called, but their modules are.
    """
    rows = [[*child] if type(child) is nn.ModuleList else [] for child in module.children()]
    blocks = [[each for each in row if can_be_block(each)] for row in rows]
    if len(rows) > 1 and isinstance(module, nn.ModuleList) and len({tuple(map(type, row)) for row in rows}) == 1:
        yield from dict.fromkeys(chain.from_iterable(blocks))
        return
    for child in module.children():
        yield from blocks_in_rows(child)


def can_be_block(module: nn.Module) -> bool:
    """Return whether a module has parameters and a forward pass."""
    return type(module).forward is not nn.Module.forward and next(module.parameters(), None) is not None
