"""`CarriedState`: what a model keeps from one batch to the next outside of its `state_dict`."""

from __future__ import annotations

import contextlib
import dataclasses
import pickle
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from trainer_kit.checkpoint.format.safetensors_writer import address
from trainer_kit.checkpoint.format.trainer_state import CARRIED_STATE, read_carried
from trainer_kit.loss.outside_modules import outside_modules
from trainer_kit.strategies.base import Strategy
from trainer_kit.utils.generators import (
    is_generator,
    is_global_generator,
    set_state_of_generator,
    state_of_generator,
)
from trainer_kit.utils.pytree import flatten_state, map_tensors, tensors
from trainer_kit.utils.units import join_names
from trainer_kit.utils.user_warnings import warn
from trainer_kit.utils.vectors import as_vector

_OF_TORCH = {*vars(nn.Module())}
_PLAIN = (type(None), bool, int, float, str)
_PASSES = 3
"""Number of passes that are watched: one alone may be the first of a text, which begins without the state."""
_LONGEST = 100
"""Most entries of a list or dict that counts as state: a longer one is a history."""


class _Place(NamedTuple):
    """Where a module keeps something.

    Attributes:
        module: The module.
        attribute: Name of the attribute.
        holder: The module's dict that has it: that of buffers, or of plain attributes.
    """

    module: nn.Module
    attribute: str
    holder: dict[str, Any]

    @property
    def value(self) -> Any:
        return self.holder.get(self.attribute)

    @property
    def is_buffer(self) -> bool:
        return self.holder is self.module._buffers


@dataclasses.dataclass(eq=False)
class _Version:
    """A tensor and the number of its changes; it is kept, so that no other one gets its identity."""

    tensor: torch.Tensor
    number: int

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Version) and self.tensor is other.tensor and self.number == other.number


class CarriedState:
    """State that a model, and modules of `compute_loss`, carry from batch to batch outside of the model's `state_dict`.

    It consists of what has changed since `begin`: non-persistent buffers, random generators, and attributes that are
    numbers, strings, tensors, or short lists, tuples and dicts of them (the hidden state of a recurrent network, the
    position in a queue).

    - A tensor that each forward pass overwrites without reading it, such as attention weights kept to be looked at, is
      left out: the first training passes after a `state_dict` show which.
    - Numbers and strings are left out if the model has replaced a module or added a hook or an object, which no state
      holds: they may say so, and the code would rely on it ("hooks are installed").

    Args:
        model: The user's model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._outside: Sequence[nn.Module] = ()
        self._watches = False
        self._before: dict[str, Any] = {}
        self._structure: list[Any] = []
        self._read, self._overwritten = set[str](), set[str]()
        self._watch: _Watch | None = None

    def begin(self, compute_loss: Callable[..., Any] | None) -> None:
        """Note what there is before a checkpoint is loaded and before the first step; the model is on its device.

        Args:
            compute_loss: The user's function, in whose modules outside of the model persistent buffers count too.
        """
        self._outside = outside_modules(compute_loss, self._model)
        # What `compute_loss` reads before it calls the model is not seen.
        self._watches = compute_loss is None and not _is_compiled(self._model)
        self._before = {name: _frozen(place.value) for name, place in self._places()}
        self._structure = self._structure_now()

    def state_dict(self) -> dict[str, Any]:
        """Return what has changed by name; empty for most models. Tensors are those of the model."""
        shared, state = self._memory_of_weights(), dict[str, Any]()
        unsure, numbers = dict[str, _Place](), dict[str, Any]()
        changed, keeps_structure = self._changed()
        for name, place in changed.items():
            found = [*tensors(place.value)]
            if is_generator(place.value):
                state[name] = state_of_generator(place.value)
            elif not found:
                numbers[name] = place.value
            elif not any(address(each) in shared for each in found):  # a view of a weight goes with the weight
                unsure |= {} if place.is_buffer or name in self._read else {name: place}
                state |= {} if name in self._overwritten else {name: place.value}
        if unsure and self._watches and self._watch is None:
            self._watch = _Watch(self._model, unsure, self._end_watch)
        return state | (numbers if keeps_structure else {})

    def load_state_dict(self, state: Mapping[str, Any], device: torch.device | None = None) -> None:
        """Restore what `state_dict` returned.

        Args:
            state: The state, with tensors on the host.
            device: Device of tensors that the model does not have yet; None: the host.
        """
        places = dict(self._places(with_missing=state))
        for name, before in self._before.items():  # has changed since the state was taken
            place = places.get(name)
            if name not in state and isinstance(before, tuple) and place and _frozen(place.value) is not None:
                place.holder[place.attribute] = before[0]
        lost = [name for name in state if name not in places]
        for name in state.keys() & places.keys():
            place = places[name]
            try:
                if is_generator(place.value):
                    set_state_of_generator(place.value, state[name])
                else:
                    place.holder[place.attribute] = _placed(state[name], place.value, device)
            except (TypeError, ValueError, RuntimeError, KeyError):
                lost.append(name)
        if lost:
            warn(f"the model does not take up the state that the checkpoint holds for {join_names(sorted(lost))}")

    def gathered(self, strategy: Strategy) -> dict[str, Any]:
        """Return the state to save: that of each reader, or one if all have the same; empty without any. Collective."""
        own = self.state_dict()
        if not strategy.collectives.is_alone:
            everyones = strategy.collectives.gather_object(map_tensors(lambda each: each.detach().cpu(), own))
            states = strategy.collectives.once_a_reader(everyones)
            return {CARRIED_STATE: _without_repetition(states)} if any(states) else {}
        return {CARRIED_STATE: [own]} if own else {}

    def load(self, directory: Path, strategy: Strategy) -> None:
        """Restore this reader's state from a checkpoint."""
        states, readers = read_carried(directory) or [{}], strategy.collectives.readers
        if len(states) in (1, readers):
            self.load_state_dict(states[strategy.collectives.reader if len(states) > 1 else 0], strategy.device)
            return
        names = dict.fromkeys(name for state in states for name in state)
        alike = {name: states[0][name] for name in names if all(_is_alike(name, states[0], each) for each in states)}
        self.load_state_dict(alike, strategy.device)
        warn(
            f"each of {len(states)} processes had a state of its own for {join_names(names.keys() - alike)} of the "
            f"model, with which {readers} cannot continue; it begins as the model was made"
        )

    def close(self) -> None:
        """Remove what watches the model."""
        if self._watch is not None:
            self._watch.close()

    def _parts(self) -> Iterator[tuple[str, nn.Module, bool]]:
        """Yield the modules with their paths, and whether they are outside of the model."""
        for path, part in self._model.named_modules():
            yield path, part, False
        for number, module in enumerate(self._outside):
            for path, part in module.named_modules(prefix=f"compute_loss.{number}"):
                yield path, part, True

    def _places(self, with_missing: Mapping[str, Any] | None = None) -> Iterator[tuple[str, _Place]]:
        for prefix, part, is_outside in self._parts():
            path, attributes = f"{prefix}." if prefix else "", vars(part)
            for name in part._buffers if is_outside else part._non_persistent_buffers_set:
                yield f"{path}{name}", _Place(part, name, part._buffers)
            for name in [name for name in attributes if name not in _OF_TORCH]:
                yield f"{path}{name}", _Place(part, name, attributes)
            for name in [name for name in with_missing or () if name.rpartition(".")[0] == prefix]:
                attribute = name.rpartition(".")[2]
                if attribute not in attributes and attribute not in part._buffers:
                    yield name, _Place(part, attribute, attributes)

    def _memory_of_weights(self) -> set[int]:
        carried = {id(place.value) for _, place in self._places() if place.is_buffer}
        kept = [each for _, part, _ in self._parts() for each in (*part._parameters.values(), *part._buffers.values())]
        plain = [each for each in kept if isinstance(each, torch.Tensor) and type(each) in (nn.Parameter, torch.Tensor)]
        return {address(each) for each in plain if id(each) not in carried} - {0}

    def _structure_now(self) -> list[Any]:
        """Return the classes of the modules and the numbers of their hooks."""
        return [
            (path, type(part), len(part._forward_hooks), len(part._forward_pre_hooks))
            for path, part, _ in self._parts()
            if part is not self._model  # whose hooks come and go
        ]

    def _changed(self) -> tuple[dict[str, _Place], bool]:
        """Return what has changed, and whether the model still has the same modules, hooks and objects."""
        changed, keeps_structure = dict[str, _Place](), self._structure_now() == self._structure
        for name, place in self._places():
            before, now = self._before.get(name, (None,)), _frozen(place.value)
            keeps_structure = keeps_structure and (now is not None or before is None)
            if now is not None and now != before:
                changed[name] = place
        return changed, keeps_structure

    def _end_watch(self, read: set[str], overwritten: set[str]) -> None:
        self._read |= read
        self._overwritten = (self._overwritten | overwritten) - read
        self._watch = None


class _Watch(TorchFunctionMode):
    """Watches which tensors of attributes the next forward passes in training mode read.

    Args:
        model: The model.
        places: The attributes by name.
        on_end: Called with the names of those that a pass read, and of those that each pass replaced unread.
    """

    def __init__(self, model: nn.Module, places: Mapping[str, _Place], on_end: Any) -> None:
        super().__init__()
        self._places = places
        self._on_end = on_end
        self._read, self._replaced = set[str](), {*places}
        self._sought: dict[int, tuple[torch.Tensor, str]] = {}  # in the current pass
        self._passes = 0
        self._handles = [
            model.register_forward_pre_hook(self._begin), model.register_forward_hook(self._end, always_call=True)
        ]  # fmt: skip

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for leaf in tree_leaves((args, kwargs)):
            if (found := self._sought.get(id(leaf))) is not None:
                self._read.add(found[1])
        return func(*args, **(kwargs or {}))

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    def _begin(self, model: nn.Module, inputs: Any) -> None:
        if model.training and not self._sought:
            found = [(name, each) for name, place in self._places.items() for each in tensors(place.value)]
            self._sought = {id(each): (each, name) for name, each in found}
            if found:
                self.__enter__()  # type: ignore[no-untyped-call]

    def _end(self, model: nn.Module, inputs: Any, output: Any) -> None:
        if not self._sought:
            return
        self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        there = {id(each) for place in self._places.values() for each in tensors(place.value)}
        kept = {name for key, (_, name) in self._sought.items() if key in there}
        self._replaced &= {name for _, name in self._sought.values()} - kept
        self._sought = {}
        self._passes += 1
        if self._passes == _PASSES:
            self.close()
            self._on_end(self._read, self._replaced - self._read)


def _is_compiled(model: nn.Module) -> bool:
    """Return whether a part of the model is compiled, in which no mode sees what is read."""
    return any(
        getattr(each, "_compiled_call_impl", None) is not None or hasattr(each, "_orig_mod") for each in model.modules()
    )


def _frozen(value: Any) -> Any:
    """Return what shows a later change of a value; None for one that is not followed.

    Numbers, strings and None are in a tuple.
    """
    if type(value) in _PLAIN:
        return (value,)
    if type(value) is torch.Tensor:
        return _Version(value, value._version) if value.layout == torch.strided and not value.is_inference() else None
    if is_generator(value):
        return None if is_global_generator(value) else pickle.dumps(state_of_generator(value))
    if type(value) not in (list, tuple, deque, dict) or len(value) > _LONGEST:
        return None
    if isinstance(value, dict):
        if any(type(key) not in _PLAIN for key in value):
            return None
        value = [*value.keys(), *value.values()]
    parts = [None if is_generator(each) else _frozen(each) for each in value]
    return None if None in parts else parts


def _placed(value: Any, present: Any, device: torch.device | None) -> Any:
    """Return a saved value for a place: in the memory of a tensor there that is like it, else on the right device."""
    if isinstance(value, torch.Tensor) and isinstance(present, torch.Tensor):
        with torch.no_grad(), contextlib.suppress(RuntimeError):  # a view of expanded memory
            if (value.shape, value.dtype) == (present.shape, present.dtype) and not present.requires_grad:
                return present.copy_(value)
        return value.to(present.device)
    return map_tensors(lambda each: each.to(device), value) if device is not None else value


def _without_repetition(states: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the states; one if they have the same bits."""
    first, *others = states
    is_same = all(
        each.keys() == first.keys() and all(_is_alike(name, first, each) for name in first) for each in others
    )
    return [first] if is_same else states


def _is_alike(name: str, one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return name in one and name in other and _bits(one[name]) == _bits(other[name])


def _bits(value: Any) -> Any:
    """Return what is equal for values with the same bits."""
    tree, found = flatten_state(value)
    vectors = {name: as_vector(each).view(torch.uint8).numpy() for name, each in found.items()}
    return tree, [(name, found[name].shape, found[name].dtype, each.tobytes()) for name, each in vectors.items()]
