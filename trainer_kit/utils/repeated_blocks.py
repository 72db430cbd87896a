"""The blocks that a model repeats, such as the layers of a transformer."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from torch import nn


def repeated_blocks(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the children of each outermost `ModuleList` or `Sequential` of at least two modules of one class.

    In place of a `ModuleList` in it, which is never called, come its own children.

    Args:
        module: The model. Its blocks have parameters and a forward pass.
    """
    rows = [[*child] if type(child) is nn.ModuleList else [child] for child in module.children()]
    is_list = isinstance(module, (nn.ModuleList, nn.Sequential))
    blocks = [[each for each in row if can_be_block(each)] for row in rows]
    if is_list and len(rows) > 1 and len({tuple(map(type, row)) for row in rows}) == 1 and all(blocks):
        yield from chain.from_iterable(blocks)
        return
    for child in module.children():
        yield from repeated_blocks(child)


def can_be_block(module: nn.Module) -> bool:
    """Return whether a module has parameters and a forward pass."""
    return type(module).forward is not nn.Module.forward and next(module.parameters(), None) is not None
