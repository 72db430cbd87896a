"""Copies in place of the modules that `compute_loss` holds, so that a trial step leaves these as they are."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from trainer_kit.loss.outside_modules import holders, outside_modules


class Substitutes:
    """Copies of the modules outside of the model that `compute_loss` holds: a teacher, a loss with a memory.

    Of a module that the model is a part of, its own weights and buffers are copied. Modules that cannot be copied stay.

    Args:
        compute_loss: The user's function; None without one.
        model: The model.
        copied: Returns a deep copy of a module.
    """

    def __init__(
        self, compute_loss: Callable[..., Any] | None, model: nn.Module, copied: Callable[[nn.Module], nn.Module]
    ) -> None:
        self._parts: list[tuple[nn.Module, dict[str, Any]]] = []
        for module in outside_modules(compute_loss, model):
            with contextlib.suppress(Exception):  # of the user's module
                others = copied(module).modules()
                pairs = zip(module.modules(), others, strict=True)
                self._parts += [(part, vars(other) | {"_modules": part._modules}) for part, other in pairs]
        for holder in holders(compute_loss, model):
            alone = nn.Module()
            tensors = {name: vars(holder)[name] for name in ("_parameters", "_buffers")}
            vars(alone).update(tensors)
            with contextlib.suppress(Exception):  # as above
                other = copied(alone)
                self._parts.append((holder, vars(holder) | {name: vars(other)[name] for name in tensors}))

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Give the modules what their copies have, and at the end what they had."""
        own = [vars(part) for part, _ in self._parts]
        try:
            for part, other in self._parts:
                object.__setattr__(part, "__dict__", other)
            yield
        finally:
            for (part, _), before in zip(self._parts, own, strict=True):
                object.__setattr__(part, "__dict__", before)
