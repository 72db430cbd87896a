"""Models made without the memory for their weights: by `model_init`, on the device "meta"."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils.weak import WeakIdKeyDictionary

from trainer_kit.utils.rng import generators_kept
from trainer_kit.utils.vectors import as_bytes

ModelInit = Callable[[], nn.Module]


def make_on_meta(model_init: ModelInit) -> nn.Module:
    """Return a model whose tensors are on the device "meta".

    Raises:
        Exception: If `model_init` fails there, since it reads values of parameters.
    """
    try:
        with torch.device("meta"):
            model = model_init()
    except Exception:  # it reads the values of other tensors
        with parameters_on_meta():
            model = model_init()
    # Not all are there: `torch.FloatTensor(4)` and `torch.from_numpy` make their tensors on the host in any case.
    moved: dict[torch.Tensor, torch.Tensor] = {}
    for module in model.modules():
        registries: tuple[dict[str, Any], ...] = module._parameters, module._buffers
        for registry in registries:
            for name, tensor in registry.items():
                if tensor is not None and not tensor.is_meta:
                    registry[name] = moved.setdefault(tensor, _without_values(tensor))
    return model


def fixed_buffers(model_init: ModelInit, names: Collection[str]) -> dict[str, torch.Tensor]:
    """Return the values that `model_init` gives to buffers, without the memory for parameters.

    Buffers that depend on parameters or on random numbers are missing.

    Args:
        model_init: Makes the model.
        names: Names of the buffers.
    """
    runs = list[dict[str, torch.Tensor]]()
    for draws in (0, 1):
        try:
            with parameters_on_meta(draws):
                runs.append(dict(model_init().named_buffers()))
        except Exception:  # it reads the values of parameters
            return {}
    first, second = runs
    return {name: first[name] for name in names if name in first and is_same(first[name], second.get(name))}


def is_same(left: torch.Tensor, right: torch.Tensor | None) -> bool:
    """Return whether two tensors have values, the same bit for bit."""
    if right is None or left.is_meta or right.is_meta or left.shape != right.shape or left.dtype != right.dtype:
        return False
    return torch.equal(as_bytes(left), as_bytes(right))


@contextlib.contextmanager
def parameters_on_meta(draws: int = 0) -> Iterator[None]:
    """Move each parameter to the device "meta" where a module registers it; other tensors have values.

    Args:
        draws: Random numbers to draw before each, so that those drawn later are others.
    """
    moved: Any = WeakIdKeyDictionary()  # a tied parameter is registered several times

    def move(module: nn.Module, name: str, parameter: nn.Parameter | None) -> Any:
        if parameter is None or parameter.is_meta:
            return None
        torch.rand(draws)
        if parameter not in moved:
            moved[parameter] = _without_values(parameter)
        return moved[parameter]

    handle = register_module_parameter_registration_hook(move)
    try:
        with generators_kept(torch.device("cpu")):
            yield
    finally:
        handle.remove()


def _without_values(tensor: torch.Tensor) -> Any:
    empty = tensor.detach().to("meta")
    return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
