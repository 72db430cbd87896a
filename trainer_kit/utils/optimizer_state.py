"""Saving and bit-identical loading of optimizer states."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from trainer_kit.utils.pytree import flatten_state, map_tensors, plain_values, strides_of_copy, tensors
from trainer_kit.utils.quantized_tensors import from_plain, parts_of, to_plain

GROUPS = "trainer_kit.groups"
"""Key of the description of the optimizer's parameters in a saved state."""

MODEL_NAME = "model_name"
"""Key of the model's own name of a parameter in its description; earlier versions did not write it."""

_PACKAGE = "trainer_kit.package"
"""Key of the package that made a saved state, for optimizers that several packages have under the same name."""

_PACKAGES = ("bitsandbytes", "torchao")

_BY_DEVICE = ("capturable", "foreach", "fused")
"""Options of torch's optimizers that depend on the device of this start, not on that of the checkpoint."""

_COUNT = "step"
"""Name of the state whose device and dtype torch itself adapts to the kernel of this start."""


def optimizers_in(optimizer: Optimizer | None) -> list[Optimizer]:
    """Return the optimizer and its inner optimizers (Muon and AdamW in one class, one inside Lookahead), each once."""
    found: list[Optimizer] = []
    waiting: list[Any] = [optimizer]
    while waiting:
        each = waiting.pop(0)
        if not isinstance(each, Optimizer) or any(each is other for other in found):
            continue
        found.append(each)
        for value in vars(each).values():
            several = value.values() if isinstance(value, dict) else value
            waiting += several if isinstance(value, (dict, list, tuple)) else [value]
    return found


def copied_optimizer(optimizer: Optimizer, memo: dict[int, Any]) -> Optimizer:
    """Return a deep copy of an optimizer and its inner optimizers, without hooks.

    torch's own copies lack the attributes that a subclass adds, and making them changes the class's `step`.

    Args:
        optimizer: The optimizer; it may have a scheduler.
        memo: Copies by the `id` of their originals, as for `copy.deepcopy`: those of its parameters.
    """
    parts = optimizers_in(optimizer)
    for part in parts:
        memo[id(part)] = type(part).__new__(type(part))
    for part in parts:
        own = {name: type(each)() if name.endswith("_hooks") else each for name, each in vars(part).items()}
        own.pop("step", None)  # a scheduler's wrapper, which calls the step of the original
        vars(memo[id(part)]).update(copy.deepcopy(own, memo))
    copied: Optimizer = memo[id(optimizer)]
    return copied


def state_tensors(optimizer: Optimizer) -> list[torch.Tensor]:
    """Return the state tensors of an optimizer and its inner optimizers."""
    found = (each for part in optimizers_in(optimizer) for each in tensors(state_of(part)))
    return [part for each in found for part in parts_of(each)]


def state_of(optimizer: Optimizer) -> Mapping[Any, Any]:
    """Return the optimizer's `state`, which a class that does not call `super().__init__()` lacks."""
    state = getattr(optimizer, "state", None)
    return state if isinstance(state, Mapping) else {}


def optimizer_state(optimizer: Optimizer) -> dict[str, Any]:
    """Return an optimizer's state for a checkpoint: its `state_dict()` and a description of its parameters.

    Raises:
        TypeError: If `state_dict()` returns no dict.
        ValueError: If `state_dict()` fails, or omits the state of an inner optimizer.
    """
    try:
        state = optimizer.state_dict()
    except AttributeError as error:  # the class does not call torch's __init__()
        raise ValueError(
            f"{_name(optimizer)}.state_dict() failed ({error}), so that no run can be saved; call super().__init__() "
            "where the optimizer is made"
        ) from error
    if not isinstance(state, dict):
        raise TypeError(f"{_name(optimizer)}.state_dict() returned a {type(state).__name__}; return a dict")
    state = to_plain(state)
    needed, kept = ({id(each) for each in found} for found in (state_tensors(optimizer), tensors(state)))
    if len(kept) < len(needed):
        parts = " and ".join(_name(part) for part in optimizers_in(optimizer)[1:])
        raise ValueError(
            f"{_name(optimizer)} consists of {parts}, but its state_dict() holds {len(kept)} of their {len(needed)} "
            "tensors, so that a resume would lose the others; return the state_dict() of each from it"
        )
    package = _package(optimizer)
    made_by = {_PACKAGE: package} if package in _PACKAGES else {}
    return {**state, **made_by, GROUPS: [_description(group) for group in optimizer.param_groups]}


def _package(optimizer: Optimizer) -> str:
    return type(optimizer).__module__.partition(".")[0]


def _description(group: Mapping[str, Any]) -> dict[str, Any]:
    names = group.get("param_names") or [None] * len(group["params"])
    return {
        "rates": {name: group[name] for name in ("lr", "initial_lr") if name in group},
        "params": [
            {"name": name, "shape": [*each.shape], "dtype": each.dtype, "strides": [*strides_of_copy(each)]}
            for name, each in zip(names, group["params"], strict=True)
        ],
    }


def described_groups(saved: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the description of the parameter groups in a saved state.

    Returns:
        For each group its "rates" ("lr", and "initial_lr" with a schedule) and its "params", each with "name" (or
        None), "shape", "dtype" and "strides", and maybe "model_name".

    Raises:
        ValueError: If `saved` was not made by `optimizer_state`.
    """
    groups = saved.get(GROUPS)
    if not isinstance(groups, list) or not all(_is_description(group) for group in groups):
        raise ValueError("the optimizer's state does not describe its parameters")
    return groups


def _is_description(group: Any) -> bool:
    kinds: dict[str, Any] = {"name": (str, type(None)), "shape": list, "dtype": torch.dtype, "strides": list}
    return (
        isinstance(group, dict)
        and isinstance(group.get("rates"), dict)
        and isinstance(group.get("params"), list)
        and all(
            isinstance(each, dict)
            and all(isinstance(each.get(name, 0), kind) for name, kind in kinds.items())
            and isinstance(each.get(MODEL_NAME), (str, type(None)))
            for each in group["params"]
        )
    )


def check_optimizer_state(optimizer: Optimizer) -> None:
    """Check that an optimizer's state can be saved and loaded.

    Raises:
        TypeError: If the state holds a value that a checkpoint cannot hold; the message names its place.
        ValueError: If `state_dict` fails, or the class overrides it without a matching `load_state_dict`.
    """
    state, kind = optimizer_state(optimizer), type(optimizer)
    if kind.load_state_dict is Optimizer.load_state_dict and not {"state", "param_groups"} <= state.keys():
        raise ValueError(
            f"{_name(optimizer)}.state_dict() returns {', '.join(map(repr, list(state)[:-1])) or 'nothing'}, which "
            "torch's load_state_dict() does not take, so that no run could be resumed; define load_state_dict() too"
        )
    try:
        flatten_state(state)
    except (TypeError, ValueError) as error:
        raise type(error)(f"the state of {_name(optimizer)} cannot be saved: {error}") from error


def load_optimizer_state(optimizer: Optimizer, saved: Mapping[str, Any]) -> None:
    """Load a state that `optimizer_state` returned, so that the next step is bit-identical.

    Unlike torch's `load_state_dict`, which casts each state to its parameter's dtype, this keeps the saved dtype.
    Dtype and strides follow the parameter's if they did so when they were saved, since fused kernels pair elements by
    memory order. `param_groups` keeps its dicts, which schedulers and outer optimizers refer to.

    Args:
        optimizer: The optimizer, changed in place.
        saved: The saved state.

    Raises:
        ValueError: If the optimizer rejects the state, or does not load all of it.
    """
    groups = described_groups(saved)
    _check_package(optimizer, saved.get(_PACKAGE))
    state = {name: value for name, value in saved.items() if name not in (GROUPS, _PACKAGE)}
    state = _with_own_options(state, optimizer.state_dict())
    before = [(part, part.param_groups, [*part.param_groups]) for part in _with_groups(optimizer)]
    try:
        optimizer.load_state_dict(from_plain(map_tensors(lambda tensor: tensor, state)))  # it may change containers
    except Exception as error:  # the user's own code
        raise ValueError(
            f"{_name(optimizer)}.load_state_dict() does not take what its state_dict() returned "
            f"({type(error).__name__}: {error}); the two must fit"
        ) from error
    for part, groups_before, dicts in before:
        _keep_groups(part, groups_before, dicts)
    _restore_values(state, optimizer.state_dict())
    loaded = to_plain(optimizer.state_dict())
    _check_loaded(optimizer, state, loaded)
    _restore_formats(optimizer, groups, state, loaded)


def _check_package(optimizer: Optimizer, package: str | None) -> None:
    """Check that the optimizer is of the package that saved the state, if the name exists in several."""
    own = _package(optimizer)
    if own != package and {own, package} & {*_PACKAGES}:
        raise ValueError(
            f"the state was saved by the {_name(optimizer)} of {package or 'another package'}, and this one is of "
            f"{own}, which keeps other values; resume with optimizer= of the same package"
        )


def _with_own_options(saved: Any, own: Any) -> Any:
    """Return the saved tree with the device options of this start's groups, at any depth."""
    if isinstance(saved, dict) and isinstance(own, dict):
        kept = {name: _with_own_options(value, own.get(name)) for name, value in saved.items()}
        return kept | {name: own[name] for name in _BY_DEVICE if name in own}
    if isinstance(saved, list) and isinstance(own, list) and len(saved) == len(own):
        return [_with_own_options(one, other) for one, other in zip(saved, own, strict=True)]
    return saved


def _with_groups(optimizer: Optimizer) -> list[Optimizer]:
    """Return the optimizers that hold groups themselves, instead of reading those of another."""
    return [part for part in optimizers_in(optimizer) if "param_groups" in vars(part)]


def _keep_groups(optimizer: Optimizer, groups: list[dict[str, Any]], dicts: list[dict[str, Any]]) -> None:
    """Restore an optimizer's own list of groups and their dicts, filled with the loaded content."""
    for old, new in zip(dicts, optimizer.param_groups, strict=True):
        if old is not new:
            content = dict(new)
            old.clear()
            old.update(content)
    groups[:] = dicts
    optimizer.param_groups = groups


def _restore_values(saved: Any, loaded: Any) -> None:
    """Restore what torch's `load_state_dict` replaces.

    These are strings (by generators), deques (without their maxlen), and numbers of subclasses of Adam (by tensors).
    """
    if isinstance(saved, dict) and isinstance(loaded, dict):
        for key in saved.keys() & loaded.keys():
            if isinstance(saved[key], str) or (
                isinstance(saved[key], (int, float)) and isinstance(loaded[key], torch.Tensor)
            ):
                loaded[key] = saved[key]
            elif isinstance(saved[key], deque):
                loaded[key] = deque(loaded[key], saved[key].maxlen)
            _restore_values(saved[key], loaded[key])


def _check_loaded(optimizer: Optimizer, saved: dict[str, Any], loaded: dict[str, Any]) -> None:
    (saved_tree, saved_tensors), (tree, found) = flatten_state(saved), flatten_state(loaded)
    if lost := saved_tensors.keys() - found.keys():
        raise ValueError(
            f"{_name(optimizer)}.load_state_dict() did not take {len(lost)} of {len(saved_tensors)} tensors of its "
            f"state ({min(lost)!r}); mend it, or the run would continue without them"
        )
    now = dict(plain_values(tree))
    for place, value in plain_values(saved_tree):
        if place in now and now[place] != value and repr(now[place]) != repr(value):
            raise ValueError(
                f"{_name(optimizer)}.load_state_dict() brought back {now[place]!r} for {value!r} at {place!r} of its "
                "state; mend it, or the run would continue with that"
            )


def _restore_formats(
    optimizer: Optimizer, groups: list[dict[str, Any]], saved: dict[str, Any], loaded: dict[str, Any]
) -> None:
    """Restore the dtype and strides of each loaded tensor, following its parameter if the saved ones did."""
    described = [each for group in groups for each in group["params"]]
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    formats = dict(zip(parameters, described, strict=False))
    owners = {
        id(tensor): parameter
        for part in optimizers_in(optimizer)
        for parameter, state in state_of(part).items()
        for tensor in tensors(state)
        if isinstance(parameter, torch.Tensor)
    }
    for name, old, new in _pairs(saved, loaded):
        if name == _COUNT or old.shape != new.shape:
            continue
        dtype, strides = old.dtype, strides_of_copy(old)
        owner = owners.get(id(new))
        if owner is not None and owner in formats:
            before = formats[owner]
            if dtype == before["dtype"] and (old.ndim or not owner.ndim):
                dtype = owner.dtype
            if old.shape == owner.shape and [*strides] == before["strides"]:
                strides = strides_of_copy(owner)
        if (new.dtype, new.stride()) != (dtype, strides):
            _replace(new, old, dtype, strides)


def _replace(tensor: torch.Tensor, values: torch.Tensor, dtype: torch.dtype, strides: tuple[int, ...]) -> None:
    """Give a tensor the values, dtype and strides, so that all references to it see them."""
    if hasattr(tensor, "__tensor_flatten__"):  # it wraps another tensor, as a sharded one does
        torch.utils.swap_tensors(tensor, values.to(device=tensor.device, dtype=dtype, copy=True))
    else:
        empty = torch.empty_strided(values.shape, strides, dtype=dtype, device=tensor.device)
        tensor.data = empty.copy_(values)


def _pairs(saved: Any, loaded: Any, name: Any = None) -> Iterator[tuple[Any, torch.Tensor, torch.Tensor]]:
    """Yield the key of each saved tensor, the tensor, and the one loaded for it."""
    if isinstance(saved, torch.Tensor) and isinstance(loaded, torch.Tensor):
        yield name, saved, loaded
    elif isinstance(saved, Mapping) and isinstance(loaded, Mapping):
        for key, value in saved.items():
            if key in loaded:
                yield from _pairs(value, loaded[key], key)
    elif isinstance(saved, (list, tuple, deque)) and isinstance(loaded, (list, tuple, deque)):
        for one, other in zip(saved, loaded, strict=False):
            yield from _pairs(one, other)


def _name(optimizer: Optimizer) -> str:
    return type(optimizer).__name__
