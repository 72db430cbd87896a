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
        modules, self._optimizers = _found(compute_loss, model)
        self._before = {module: _gradients(module) for module in modules}

    def warn(
        self, optimizer: torch.optim.Optimizer, own: Iterable[torch.Tensor], saved: Iterable[Stateful] | None
    ) -> None:
        """Warn of what the first step has shown: weights that nothing trains or saves.

        Args:
            optimizer: The run's optimizer.
            own: The model's parameters.
            saved: What checkpoints hold apart from model and optimizer; None in a run without checkpoints.
        """
        held = set(_parameters(optimizer))
        trained = held.union(*map(_parameters, self._optimizers))
        forgotten = [module for module, before in self._before.items() if _gradients(module, trained) - before]
        if forgotten:
            warn(
                f"compute_loss computes gradients for weights of {_named(forgotten)}, which the optimizer does not "
                "have and so does not train; make it a part of the model, or freeze it by requires_grad_(False)"
            )
        strangers = held.difference(own)
        others = [each for each in self._optimizers if each.state and held.isdisjoint(_parameters(each))]
        if saved is None or not (strangers or others):
            return
        safe = {tensor.data_ptr() for tensor in tensors([each.state_dict() for each in saved])}
        unsaved = [each for each in others if any(each.data_ptr() not in safe for each in tensors(dict(each.state)))]
        if unsaved:
            names = join_names(type(each).__name__ for each in unsaved)
            warn(
                f"compute_loss holds an optimizer ({names}) whose state no checkpoint holds, so that a resume is not "
                "exact; add it to trainer.run.stateful"
            )
        if lost := [parameter for parameter in strangers if parameter.data_ptr() not in safe]:
            warn(
                f"the optimizer has parameters that are not the model's ({len(lost)}), which no checkpoint holds; make "
                "what they belong to (a loss with weights) a part of the model, or add it to trainer.run.stateful"
            )


def outside_modules(compute_loss: Callable[..., Any] | None, model: nn.Module) -> list[nn.Module]:
    """Return the modules outside of the model that `compute_loss` holds, in an order that its code fixes."""
    return _found(compute_loss, model)[0]


def holders(compute_loss: Callable[..., Any] | None, model: nn.Module) -> list[nn.Module]:
    """Return the modules that `compute_loss` holds and that the model is a part of; their own tensors are outside."""
    own, held = {id(module) for module in model.modules()}, _all_held(compute_loss)
    parts = [part for each in held if isinstance(each, nn.Module) for part in each.modules() if id(part) not in own]
    return [part for part in dict.fromkeys(parts) if any(id(below) in own for below in part.modules())]


def _found(
    compute_loss: Callable[..., Any] | None, model: nn.Module
) -> tuple[list[nn.Module], list[torch.optim.Optimizer]]:
    """Return these modules, and the optimizers that it holds."""
    own, held = {id(module) for module in model.modules()}, _all_held(compute_loss)
    modules = [module for each in held if isinstance(each, nn.Module) for module in _outside(each, own)]
    return modules, [each for each in held if isinstance(each, torch.optim.Optimizer)]


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


def _all_held(compute_loss: Callable[..., Any] | None) -> list[Any]:
    held: list[Any] = []
    with contextlib.suppress(Exception):  # of the user's objects: what was found before is enough
        held += _held(compute_loss)
    return held


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
