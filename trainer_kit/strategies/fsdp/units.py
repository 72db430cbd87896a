"""Units of a sharded model: the modules whose parameters are gathered, used and resharded together."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from trainer_kit.utils.module_patterns import outermost_matches, prefixes
from trainer_kit.utils.repeated_blocks import can_be_block, repeated_blocks
from trainer_kit.utils.tied_parameters import parameters_by_all_names
from trainer_kit.utils.units import format_size, join_names


class Unit(NamedTuple):
    """A module that is gathered as one, without the units inside it.

    Attributes:
        name: Name of the module in the model.
        module: The module.
    """

    name: str
    module: nn.Module


def find_units(model: nn.Module, patterns: Sequence[str] | None = None) -> list[Unit]:
    """Find the units of a model. Parameters outside of them form the root unit, which is not in the list.

    Without patterns, units are the children of each outermost `ModuleList` or `Sequential` that repeats one class, and
    an input embedding that is larger than each of them. A module that shares a parameter with a module outside of it
    is no unit then, so tied parameters are always in one unit.

    Args:
        model: Model, also on the meta device; its weights are tied.
        patterns: Patterns (`fnmatch`) of module names or class names. Of the modules that one pattern matches, the
            outermost are units; units of several patterns may contain each other. None: see above.

    Returns:
        The units in the order of the model; a unit comes before those that it contains.

    Raises:
        TypeError: If `patterns` is a single string.
        ValueError: If a pattern matches no module that can be a unit, or the units would part a tied parameter.
    """
    if patterns is None:
        found = _repeated(model)
    elif isinstance(patterns, str):
        raise TypeError(f"units={patterns!r} must be a list of patterns; use units=[{patterns!r}]")
    else:
        found = {module for pattern in patterns for module in _matched(model, pattern)}
    units = [Unit(name, module) for name, module in model.named_modules() if module in found]
    _refuse_parted(model, units)
    return units


def check_units(model: nn.Module, units: Sequence[Unit]) -> None:
    """Refuse what cannot be sharded, before anything is.

    Args:
        model: Model, not sharded yet.
        units: Its units, without the root unit.

    Raises:
        ValueError: If a parameter is lazy, sparse or a DTensor; if gradients are sparse; or
            if the trained parameters of one unit, the root unit included, have several dtypes.
    """
    for module_name, module in model.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse and module.weight.requires_grad:
            raise ValueError(
                f"{module_name!r} has sparse gradients, which cannot be sharded; make it with sparse=False"
            )
    names = {unit.module: f"unit {unit.name!r}" for unit in units}
    first: dict[nn.Module, tuple[str, torch.dtype]] = {}
    for parameter, places in _places(model, names).items():
        ((unit, name),) = places.items()
        _check_parameter(name, parameter)
        if not parameter.requires_grad or stays_whole(parameter):
            continue
        other, dtype = first.setdefault(unit, (name, parameter.dtype))
        if dtype != parameter.dtype:
            raise ValueError(
                f"{names.get(unit, 'the root unit')} trains {other!r} in {_name(dtype)} and {name!r} in "
                f"{_name(parameter.dtype)}; cast one of them, or name the modules of one dtype (such as adapters) in "
                "units"
            )


def stays_whole(parameter: torch.Tensor) -> bool:
    """Return whether each process holds the whole parameter, which `fully_shard` could not divide."""
    return parameter.ndim == 0 or not parameter.numel()


def unit_sizes(model: nn.Module, units: Sequence[Unit], dtype: torch.dtype | None = None) -> dict[str, int]:
    """Return the bytes of each unit's gathered parameters by its name; that of the root unit is "".

    Args:
        model: Model, not sharded yet.
        units: Its units, without the root unit.
        dtype: Dtype in which floating-point parameters are gathered; None for their own.
    """
    names = {unit.module: unit.name for unit in units}
    sizes = dict.fromkeys(["", *names.values()], 0)
    for parameter, places in _places(model, names).items():
        gathered = dtype if dtype is not None and parameter.is_floating_point() else parameter.dtype
        sizes[names.get(next(iter(places)), "")] += parameter.numel() * gathered.itemsize
    return sizes


def describe_single_unit(model: nn.Module) -> str:
    """Return the warning for a model in which no unit was found; it names the classes of its longest list of blocks."""
    tied = set(repeated_blocks(model))
    lists = [[*each] for each in model.modules() if isinstance(each, (nn.ModuleList, nn.Sequential))]
    lists = [blocks for blocks in lists if all(map(can_be_block, blocks)) and tied.isdisjoint(blocks)]
    longest = max(lists, key=len, default=[])
    classes = join_names(dict.fromkeys(repr(type(block).__name__) for block in longest)) if len(longest) > 1 else ""
    return (
        f"no units were found in {type(model).__name__}, so each process gathers the whole model at once "
        f"({format_size(_nbytes(model))}); use units=[...] with patterns of names or class names of its modules"
        f"{f', such as {classes}' if classes else ''}"
    )


def _repeated(model: nn.Module) -> set[nn.Module]:
    """Return the units that are found without patterns."""
    found = set(repeated_blocks(model))
    for places in _places(model, found).values():
        if len(places) > 1:
            found -= places.keys()
    embedding = _input_embedding(model)
    if embedding is not None and found and _nbytes(embedding) > max(map(_nbytes, found)):
        found.add(embedding)
    return found


def _input_embedding(model: nn.Module) -> nn.Module | None:
    """Return the input embedding of a transformers model if it is tied to nothing."""
    getter: Any = getattr(model, "get_input_embeddings", None)
    try:
        embedding = getter and getter()
    except NotImplementedError:  # transformers' answer for a model without one
        return None
    if not isinstance(embedding, nn.Module) or not can_be_block(embedding):
        return None
    own = {*embedding.parameters()}
    names = [name for name, parameter in parameters_by_all_names(model) if parameter in own]
    return embedding if len(names) == len(own) else None


def _matched(model: nn.Module, pattern: str) -> list[nn.Module]:
    """Return the outermost modules whose name or class name matches the pattern."""
    found = outermost_matches(model, pattern, can_be_block)
    if not found:
        raise ValueError(
            f"units: {pattern!r} matches no module with parameters and a forward pass inside "
            f"{type(model).__name__}; use a pattern of module names or of class names"
            f"{_examples(model)}"
        )
    return [*found.values()]


def _examples(model: nn.Module) -> str:
    """Return names of the model's units for a sentence."""
    found = _repeated(model)
    classes = {type(module).__name__: name for name, module in reversed([*model.named_modules()]) if module in found}
    return f", such as {join_names(f'{name!r} ({kind})' for kind, name in classes.items())}" if classes else ""


def _refuse_parted(model: nn.Module, units: Sequence[Unit]) -> None:
    names = {unit.module: f"unit {unit.name!r}" for unit in units}
    for places in _places(model, names).values():
        if len(places) > 1:
            first, second, *_ = (f"{name!r} in {names.get(unit, 'the root unit')}" for unit, name in places.items())
            raise ValueError(
                f"units part a tied parameter: it is {first} and {second}; use units that hold both or neither"
            )


def _places(model: nn.Module, units: Collection[nn.Module]) -> dict[nn.Parameter, dict[nn.Module, str]]:
    """Return for each parameter the innermost units it lies in, each with a name; the root unit is the model.

    All names of a tied parameter count, and all names of a module that is used in several places.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    places: dict[nn.Parameter, dict[nn.Module, str]] = {}
    for name, parameter in parameters_by_all_names(model):
        unit = next((modules[outer] for outer in prefixes(name) if modules[outer] in units), model)
        places.setdefault(parameter, {}).setdefault(unit, name)
    return places


def _check_parameter(name: str, parameter: nn.Parameter) -> None:
    if isinstance(parameter, DTensor):
        raise ValueError(f"{name!r} is a DTensor already; use a model that is not sharded or parallelized yet")
    if is_lazy(parameter):
        raise ValueError(f"{name!r} of a lazy module has no shape yet; pass a batch through the model first")
    if parameter.layout is not torch.strided:
        raise ValueError(f"{name!r} is sparse ({_name(parameter.layout)}), which cannot be sharded; make it dense")


def _nbytes(module: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in module.parameters())


def _name(value: torch.dtype | torch.layout) -> str:
    return str(value).removeprefix("torch.")
