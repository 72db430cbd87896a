"""Modules that `compute_loss` uses outside of the model, such as a loss with weights that is forgotten."""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import chain, islice
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from trainer_kit.state import Stateful
from trainer_kit.utils.functions import globals_of, held_by
from trainer_kit.utils.pytree import tensors
from trainer_kit.utils.units import join_names
from trainer_kit.utils.user_warnings import warn
from trainer_kit.utils.wrappers import model_class

_SOUGHT = (nn.Module, torch.optim.Optimizer)
_DEEPEST = 5
"""Deepest level to look at, from `compute_loss` itself."""
_LONGEST = 100
"""Most entries of an object to look at."""
_MOST = 2_000
"""Largest number of objects to look at."""


class OutsideModules:
    """The modules outside of the model that a training may depend on, before its first step.

    Args:
        compute_loss: The user's function; None without one.
        model: The model.
    """

    def __init__(self, compute_loss: Callable[..., Any] | None, model: nn.Module) -> None:
        own = {id(module) for module in model.modules()}
        held: list[Any] = []
        with contextlib.suppress(Exception):  # of the user's objects: what was found before is enough
            held += _held(compute_loss)
        modules = [module for each in held if isinstance(each, nn.Module) for module in _outside(each, own)]
        optimizers = [each for each in held if isinstance(each, torch.optim.Optimizer)]
        self._model = model
        self._modules = {module: (_gradients(module), _buffers(module)) for module in modules}
        self._trained = {parameter for each in optimizers for parameter in _parameters(each)}

    def warn(self, optimizer: torch.optim.Optimizer, saved: Iterable[Stateful] | None) -> None:
        """Warn of what the first step has shown: weights that nothing trains, weights and buffers that nothing saves.

        Args:
            optimizer: The run's optimizer.
            saved: What checkpoints hold apart from model and optimizer; None in a run without checkpoints.
        """
        modules, self._modules = self._modules, {}  # of old buffers too
        held = set(_parameters(optimizer))
        trained = held | self._trained
        forgotten = [module for module, (before, _) in modules.items() if _gradients(module, trained) - before]
        if forgotten:
            warn(
                f"compute_loss computes gradients for weights of {_named(forgotten)}, which the optimizer does not "
                "have and so does not train; make it a part of the model, or freeze it by requires_grad_(False)"
            )
        strangers = held.difference(self._model.parameters())
        changed = {
            module: found for module, (_, before) in modules.items() if (found := _changed(before, _buffers(module)))
        }
        if saved is None or not (strangers or changed):
            return
        safe = {tensor.data_ptr() for tensor in tensors([each.state_dict() for each in saved])}
        if lost := [parameter for parameter in strangers if parameter.data_ptr() not in safe]:
            warn(
                f"the optimizer has parameters that are not the model's ({len(lost)}), which no checkpoint holds; make "
                "what they belong to (a loss with weights) a part of the model, or add it to trainer.run.stateful"
            )
        if unsaved := [module for module, found in changed.items() if not safe.issuperset(found)]:
            warn(
                f"compute_loss changes buffers of {_named(unsaved)}, which no checkpoint holds; make it a part of the "
                "model, or add it to trainer.run.stateful"
            )


def _parameters(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    return chain.from_iterable(group["params"] for group in optimizer.param_groups)


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


def _gradients(module: nn.Module, trained: Collection[torch.Tensor] = ()) -> set[tuple[int, int]]:
    """Return identity and version of each gradient of weights that are not `trained`."""
    return {
        (id(parameter.grad), parameter.grad._version)
        for parameter in module.parameters()
        if parameter not in trained and parameter.grad is not None
    }


def _buffers(module: nn.Module) -> dict[str, tuple[torch.Tensor, int]]:
    """Return each buffer that a checkpoint would have, and its version."""
    return {
        f"{prefix}.{name}": (buffer, buffer._version)
        for prefix, part in module.named_modules()
        for name, buffer in part._buffers.items()
        if buffer is not None
        and name not in part._non_persistent_buffers_set
        and not (is_lazy(buffer) or buffer.is_inference())
    }


def _changed(before: dict[str, tuple[torch.Tensor, int]], now: dict[str, tuple[torch.Tensor, int]]) -> set[int]:
    """Return the addresses of buffers that have changed, not those that were moved to another device or dtype."""
    return {
        buffer.data_ptr()
        for name, (buffer, version) in now.items()
        if name not in before
        or (buffer is before[name][0] and version != before[name][1])
        or (
            buffer is not before[name][0]
            and (buffer.dtype, buffer.device) == (before[name][0].dtype, before[name][0].device)
        )
    }


def _held(value: Any) -> Iterator[Any]:
    """Yield the modules and optimizers that an object holds: in attributes, a closure, or globals of its code."""
    level, seen = [value], set[int]()
    for _ in range(_DEEPEST):
        below: list[Any] = []
        for each in level:
            if id(each) in seen or len(seen) > _MOST:
                continue
            seen.add(id(each))
            if isinstance(each, _SOUGHT):
                yield each
            else:
                below += _parts(each)
        level = below


def _parts(value: Any) -> Iterator[Any]:
    if isinstance(value, functools.partial):
        yield from (value.func, *value.args, *value.keywords.values())
    elif isinstance(value, types.MethodType):
        yield from (value.__func__, value.__self__)
    elif isinstance(value, types.FunctionType):
        yield from (each for _, each in held_by(value))
        kinds = (*_SOUGHT, types.FunctionType, functools.partial)
        yield from (each for _, each in globals_of(value) if isinstance(each, kinds))
    elif isinstance(value, (list, tuple)):
        yield from value[:_LONGEST]
    elif isinstance(value, dict):
        yield from islice(value.values(), _LONGEST)
    elif not isinstance(value, (type, types.ModuleType, torch.Tensor)):
        yield from islice(getattr(value, "__dict__", {}).values(), _LONGEST)
