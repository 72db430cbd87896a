"""The blocks that a model repeats, such as the layers of a transformer."""

from __future__ import annotations

from collections.abc import Iterator

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


def can_be_block(module: nn.Module) -> bool:
    """Return whether a module has parameters and a forward pass."""
    return type(module).forward is not nn.Module.forward and next(module.parameters(), None) is not None
