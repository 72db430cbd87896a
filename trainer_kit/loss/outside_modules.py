"""Modules that `compute_loss` uses outside of the model, such as a loss with weights that is forgotten."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Collection, Iterator
from itertools import chain
from typing import Any

import torch
from torch import nn

from trainer_kit.utils.units import join_names
from trainer_kit.utils.user_warnings import warn
from trainer_kit.utils.wrappers import model_class

_DEEPEST = 4
"""Objects between `compute_loss` and a module that is still found."""


class OutsideModules:
    """The modules outside of the model that a training may depend on, before its first step.

    Args:
        compute_loss: The user's function; None without one.
        model: The model.
    """

    def __init__(self, compute_loss: Callable[..., Any] | None, model: nn.Module) -> None:
        own = {id(module) for module in model.modules()}
        found = chain.from_iterable(_outside(module, own) for module in _held(compute_loss, _DEEPEST))
        self._model = model
        self._modules = [*dict.fromkeys(found)]
        self._before = [_versions(module) for module in self._modules]

    def warn(self, optimizer: torch.optim.Optimizer, saved: Collection[Any], is_saving: bool) -> None:
        """Warn of what the first step has shown: weights that nothing trains, weights and buffers that nothing saves.

        Args:
            optimizer: The run's optimizer.
            saved: The user's own objects that checkpoints hold.
            is_saving: Whether the run saves checkpoints.
        """
        held = {parameter for group in optimizer.param_groups for parameter in group["params"]}
        forgotten = [module for module in self._modules if _gets_gradients(module, held)]
        if forgotten:
            warn(
                f"compute_loss computes gradients for weights of {_named(forgotten)}, which the optimizer does not "
                "have and so does not train; make it a part of the model, or freeze it by requires_grad_(False)"
            )
        if not is_saving:
            return
        safe = {id(part) for each in saved if isinstance(each, nn.Module) for part in (each, *each.parameters())}
        own = set(self._model.parameters())
        strangers = [parameter for parameter in held if parameter not in own and id(parameter) not in safe]
        if strangers:
            warn(
                f"the optimizer has parameters that are not the model's ({len(strangers)}), which no checkpoint holds; "
                "make what they belong to (a loss with weights) a part of the model"
            )
        changed = [
            module
            for module, before in zip(self._modules, self._before, strict=True)
            if id(module) not in safe and _versions(module) != before
        ]
        if changed:
            warn(
                f"compute_loss changes buffers of {_named(changed)}, which no checkpoint holds; make it a part of the "
                "model, or add it to trainer.run.stateful"
            )


def _outside(module: nn.Module, own: Collection[int]) -> Iterator[nn.Module]:
    """Yield the largest parts of a module that share no part with the modules in `own`."""
    if id(module) in own:
        return
    if any(id(part) in own for part in module.modules()):
        for child in module.children():
            yield from _outside(child, own)
    else:
        yield module


def _named(modules: list[nn.Module]) -> str:
    return join_names(dict.fromkeys(model_class(module).__name__ for module in modules))


def _gets_gradients(module: nn.Module, held: Collection[nn.Parameter]) -> bool:
    return any(parameter.grad is not None and parameter not in held for parameter in module.parameters())


def _versions(module: nn.Module) -> dict[str, tuple[int, int]]:
    """Return identity and version of each buffer that a checkpoint would have."""
    return {
        f"{prefix}.{name}": (id(buffer), buffer._version)
        for prefix, part in module.named_modules()
        for name, buffer in part._buffers.items()
        if buffer is not None and name not in part._non_persistent_buffers_set and not buffer.is_inference()
    }


def _held(value: Any, depth: int) -> Iterator[nn.Module]:
    """Yield the modules that an object holds: in attributes, arguments, a closure, or globals that its code uses."""
    if isinstance(value, nn.Module):
        yield value
    elif depth:
        for part in _parts(value):
            yield from _held(part, depth - 1)


def _parts(value: Any) -> Iterator[Any]:
    if isinstance(value, functools.partial):
        yield from (value.func, *value.args, *value.keywords.values())
    elif isinstance(value, types.MethodType):
        yield from (value.__func__, value.__self__)
    elif isinstance(value, types.FunctionType):
        empty = types.CellType()  # raises when it is read
        yield from (cell.cell_contents for cell in value.__closure__ or () if cell != empty)
        yield from (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
        named = (value.__globals__.get(name) for name in _names(value.__code__))
        yield from (each for each in named if isinstance(each, (nn.Module, types.FunctionType, functools.partial)))
    elif isinstance(value, (list, tuple)):
        yield from value[:100]
    elif isinstance(value, dict):
        yield from [*value.values()][:100]
    elif not isinstance(value, (type, types.ModuleType, torch.Tensor)):
        yield from vars(value).values() if hasattr(value, "__dict__") else ()


def _names(code: types.CodeType) -> Iterator[str]:
    inner = (each for each in code.co_consts if isinstance(each, types.CodeType))
    return chain(code.co_names, chain.from_iterable(map(_names, inner)))
