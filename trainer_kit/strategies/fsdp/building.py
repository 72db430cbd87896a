"""Values for a sharded model that was made on the device "meta": what no file holds is computed again.

The model's own code computes them in an outline of the model, so that loaded weights never change.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch

from trainer_kit.strategies.fsdp.making import is_same
from trainer_kit.utils.rng import generators_kept, seed_generators
from trainer_kit.utils.transformers_models import is_transformers_model
from trainer_kit.utils.units import join_names
from trainer_kit.utils.wrappers import model_class


@torch.no_grad()
def refill_buffers(model: torch.nn.Module, names: Collection[str]) -> set[str]:
    """Compute again buffers that no file holds, such as the frequencies of rotary embeddings, on each process.

    The values come from the `_init_weights()` of a transformers model, else from the owner's `reset_buffers()`.

    Args:
        model: The sharded model, on a real device.
        names: Names of the buffers, whose values `to_empty` left undefined.

    Returns:
        Names of the buffers that have their values; neither of the two gives one to the others.
    """
    outline, filled = _Outline(model), set[str]()
    for path, here in _by_owner(names):
        values = outline.initialized(path, here)
        for name in here:
            if name in values:
                model.get_buffer(name).copy_(values[name])
                filled.add(name)
    return filled


def check_complete(model: torch.nn.Module) -> None:
    """Check that no tensor of a model is left on the device "meta".

    Raises:
        ValueError: If one is: a parameter, a buffer, or a tensor that is an attribute of a module.
    """
    named = itertools.chain(model.named_parameters(), model.named_buffers(), _attributes(model))
    if empty := [repr(name) for name, tensor in named if tensor.is_meta]:
        raise ValueError(
            f"{join_names(empty)} of {model_class(model).__name__} have no value: they are on the device 'meta'; "
            "make them parameters or buffers, which are loaded or initialized"
        )


def _attributes(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for path, module in model.named_modules():
        for key, value in vars(module).items():
            if isinstance(value, torch.Tensor):
                yield f"{path}.{key}" if path else key, value


def _by_owner(names: Collection[str]) -> list[tuple[str, list[str]]]:
    """Return the names by the path of the module that owns them, in the order of the first ones."""
    owners: dict[str, list[str]] = {}
    for name in names:
        owners.setdefault(name.rpartition(".")[0], []).append(name)
    return list(owners.items())


def _tensor(model: torch.nn.Module, name: str) -> torch.Tensor:
    path, _, key = name.rpartition(".")
    owner = model.get_submodule(path)
    found = owner._parameters.get(key)
    return owner.get_buffer(key) if found is None else found


class _Outline:
    """A copy of a model's modules, with plain whole tensors on the device "meta", in which initializers run.

    Args:
        model: The model.

    Attributes:
        module: The copy.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._modules: dict[torch.nn.Module, torch.nn.Module] = {}
        self._tensors: dict[int, torch.Tensor] = {}  # by the model's own, so that ties stay
        self._places: dict[int, list[tuple[dict[str, Any], str]]] = {}  # where the copy has each of these
        self.module = self._copy(model)

    def _copy(self, module: torch.nn.Module) -> torch.nn.Module:
        if module not in self._modules:
            copied = self._modules[module] = object.__new__(type(module))
            vars(copied).update(
                vars(module),
                _modules={name: child and self._copy(child) for name, child in module._modules.items()},
                _parameters=self._on_meta(module._parameters),
                _buffers=self._on_meta(module._buffers),
                _non_persistent_buffers_set=set(module._non_persistent_buffers_set),
            )
        return self._modules[module]

    def _on_meta(self, registry: Mapping[str, torch.Tensor | None]) -> dict[str, torch.Tensor | None]:
        copied: dict[str, torch.Tensor | None] = {}
        for key, tensor in registry.items():
            copied[key] = None
            if tensor is not None:
                copied[key] = empty = self._tensors.setdefault(id(tensor), _empty_like(tensor, "meta"))
                self._places.setdefault(id(empty), []).append((copied, key))
        return copied

    def initialized(self, path: str, names: list[str]) -> dict[str, torch.Tensor]:
        """Return the values that the model's code gives to tensors of one module, on the CPU; others are missing.

        Args:
            path: Path of the module.
            names: Names of the tensors.
        """
        values: dict[str, torch.Tensor] = {}
        for call in (self._init_weights, self._reset_buffers):
            left = [name for name in names if name not in values]
            # What the code does not write keeps what it had before: 0 in one run, 1 in the other.
            runs = [self._run(call, path, left, fill) for fill in (0, 1)] if left else []
            values |= {name: runs[0][name] for name in left if is_same(runs[0][name], runs[1][name])}
        return {name: value for name, value in values.items() if value.shape == _tensor(self.module, name).shape}

    def _run(self, call: Callable[[str], None], path: str, names: list[str], fill: int) -> dict[str, torch.Tensor]:
        """Return the tensors after a call, before which all their elements are `fill`."""
        before = {name: _tensor(self.module, name) for name in names}
        for tensor in before.values():
            self._put(tensor, _empty_like(tensor, "cpu").fill_(fill))
        try:
            with generators_kept(torch.device("cpu")):
                seed_generators(0)
                call(path)
            return {name: _tensor(self.module, name).detach() for name in names}
        finally:
            for tensor in before.values():
                self._put(tensor, tensor)

    def _put(self, tensor: torch.Tensor, value: torch.Tensor) -> None:
        for registry, key in self._places[id(tensor)]:
            registry[key] = value

    def _init_weights(self, path: str) -> None:
        """Call `_init_weights()` of the transformers models around a module, as they do: inner modules first."""
        keys = path.split(".") if path else []
        parents = [self.module, *(self.module.get_submodule(".".join(keys[: end + 1])) for end in range(len(keys)))]
        while parents:
            owner = next((module for module in reversed(parents) if is_transformers_model(module)), None)
            if owner is not None:
                owner._init_weights(parents[-1])  # type: ignore[operator]
            parents.pop()

    def _reset_buffers(self, path: str) -> None:
        if reset := getattr(self.module.get_submodule(path), "reset_buffers", None):
            reset()


def _empty_like(tensor: torch.Tensor, device: str) -> torch.Tensor:
    empty = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    return torch.nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, torch.nn.Parameter) else empty
