"""`CarriedState`: what a model keeps from one batch to the next outside of its `state_dict`."""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, Sampler

from trainer_kit.callback import Callback
from trainer_kit.checkpoint.attribute_notes import AttributeNotes, bits_of, note_of_bits, note_of_tensor
from trainer_kit.checkpoint.format.safetensors_writer import refuse_unstorable
from trainer_kit.checkpoint.format.trainer_state import CARRIED_STATE, read_carried, read_trainer
from trainer_kit.checkpoint.rank_allocators import is_rank_allocator, set_state_of_allocator, state_of_allocator
from trainer_kit.data.own_generators import held_generators
from trainer_kit.data.run_length import RunLength
from trainer_kit.loss.outside_modules import holders, outside_modules
from trainer_kit.run import Run
from trainer_kit.utils.generators import (
    is_generator,
    set_state_of_generator,
    state_of_generator,
)
from trainer_kit.utils.pytree import map_tensors
from trainer_kit.utils.units import join_names
from trainer_kit.utils.user_warnings import warn

logger = logging.getLogger("trainer_kit")

_OF_TORCH = {*vars(nn.Module())}
_NEAR = 3
"""Levels to look at for generators outside of the model: those further away may have another owner, such as a study."""
_RESTORED = _BUFFERS, _GENERATORS, _ALLOCATORS = "buffers", "generators", "rank allocators"
_ATTRIBUTES, _ABSENT = "attributes", "absent"
_OUTSIDE = "compute_loss "
"""Beginning of the names of what is outside of the model, which no name of a part of it can have."""


class CarriedState:
    """State that a model, and modules of `compute_loss`, carry from batch to batch outside of the model's `state_dict`.

    It consists of the rank allocators of AdaLoRA, and of the buffers that it lacks, buffers and weights of modules of
    `compute_loss`, and random generators in attributes, if they have changed since training began: a spiking network's
    membrane, a memory bank, a teacher that follows the model. A buffer that only the first step has changed is a cache,
    which another start computes for its own settings. Random generators that `compute_loss`, the optimizer and
    callbacks hold are part of it too. One that the checkpoint lacks has not been drawn from before, so that a rollback
    brings it back to its first state.

    Tensors and numbers in attributes, and in the containers and objects there, may be such state too, or flags and
    caches that belong to this process. So they are not restored; the log of a resume names the attributes that change.

    Args:
        run: The run.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._owners: list[tuple[str, Any]] = []
        self._outside: Sequence[nn.Module] = ()
        self._holders: Sequence[nn.Module] = ()
        self._start, self._before = 0, dict[str, Any]()
        self._initial: dict[str, Any] = {}  # states of generators
        self._first: tuple[int, dict[str, Any]] | None = None  # step and notes after the first step
        self._restored: set[str] = set()  # names of tensors, which an earlier start has changed

    def begin(self, compute_loss: Callable[..., Any] | None, callbacks: Iterable[Callback] = ()) -> None:
        """Note what there is before a checkpoint is loaded and before the first step; the model is on its device.

        Args:
            compute_loss: The user's function, in whose modules outside of the model persistent buffers count too.
            callbacks: The run's callbacks.
        """
        names = Counter[str]()
        self._owners = [("compute_loss", compute_loss), ("optimizer", self._run.optimizer)]
        for each in callbacks:
            name = type(each).__name__
            self._owners.append((f"{name} {names[name] + 1}" if names[name] else name, each))
            names[name] += 1
        self._outside, self._first = outside_modules(compute_loss, self._run.model), None
        self._holders = holders(compute_loss, self._run.model)
        held = [*self._attributes()]
        self._start, self._before = self._run.state.step, self._notes(held)
        self._initial = {name: state_of_generator(each) for name, each in held if is_generator(each)}

    def own(self) -> dict[str, Any]:
        """Return this process's state, with the model's own tensors; empty for most models."""
        held = [*self._attributes()]
        step, notes = self._run.state.step, self._notes(held)
        if self._first is None and step > self._start:
            self._first = step, notes
        first = self._before if self._first is None or step == self._first[0] else self._first[1]
        used = {name for name, note in notes.items() if note != self._before.get(name)}
        named = [*self._tensors()]
        tensors = {name: own[key] for name, own, key, _ in named if own[key] is not None}
        weights = {name for name, *_, is_weight in named if is_weight}
        changed = {name for name in used if notes[name] != first.get(name)} | used & weights | self._restored
        buffers = {name: value.detach() for name, value in tensors.items() if name in changed}
        generators = {name: state_of_generator(each) for name, each in held if name in used and is_generator(each)}
        found = {name: state_of_allocator(each) for name, each in held if is_rank_allocator(each)}
        allocators = {name: each for name, each in found.items() if each}
        if allocators:  # the configuration has the ranks that they keep
            changed = {name for name in changed if not name.endswith("peft_config")}
        # The first step fills caches.
        attributes = changed - buffers.keys() - generators.keys() - found.keys() if first is not self._before else ()
        state = {_BUFFERS: buffers, _GENERATORS: generators, _ALLOCATORS: allocators, _ATTRIBUTES: sorted(attributes)}
        return {kind: values for kind, values in state.items() if values}

    def gathered(self) -> dict[str, Any]:
        """Return the states to save; empty without any. Collective.

        If those of the readers differ, there is one for each. The first is whole. The others hold what differs from it,
        and the names of what is absent there, see `_joined`.
        """
        own, collectives = self.own(), self._run.strategy.collectives
        if collectives.is_alone:
            return {CARRIED_STATE: [own]} if own else {}
        bits = {(kind, name): bits_of(value) for kind in _RESTORED for name, value in own.get(kind, {}).items()}
        found = collectives.once_a_reader(collectives.gather_object((bits, own.get(_ATTRIBUTES, []))))
        alike = {key for key, value in found[0][0].items() if all(each.get(key) == value for each, _ in found)}
        if all(each.keys() == alike for each, _ in found) and all(names == found[0][1] for _, names in found):
            return {CARRIED_STATE: [own]} if own else {}
        shared, different = {}, {_ATTRIBUTES: own.get(_ATTRIBUTES, [])}
        for kind in _RESTORED:
            values = own.get(kind, {})
            shared[kind] = {name: value for name, value in values.items() if (kind, name) in alike}
            different[kind] = {name: value for name, value in values.items() if (kind, name) not in alike}
        different = map_tensors(lambda each: each.detach().cpu(), different)
        first, *others = collectives.once_a_reader(collectives.gather_object(different))
        for kind in _RESTORED:
            for each in others:
                each.setdefault(_ABSENT, []).extend(name for name in first[kind] if name not in each[kind])
            first[kind] = shared[kind] | first[kind]
        return {CARRIED_STATE: [first, *others]}

    def load(self, directory: Path, plan: RunLength) -> None:
        """Restore this reader's state from a checkpoint.

        Args:
            directory: The checkpoint.
            plan: The run's plan. If its batches have another size than those of the checkpoint, buffers that have
                another shape than the model's begin as it was made.
        """
        states, collectives = read_carried(directory) or [{}], self._run.strategy.collectives
        trainer = read_trainer(directory)
        assert trainer is not None
        now, earlier = plan.state_dict(), trainer["plan"]
        keeps_batches = all(earlier[name] == now[name] for name in ("processes", "batch_size"))
        first, *others = states
        own: Mapping[str, Any] = others[collectives.reader - 1] if 0 < collectives.reader < len(states) else {}
        lost: dict[str, None] = {}
        if len(states) != collectives.readers:
            lost = dict.fromkeys(
                name for each in others for kind in (*_RESTORED, _ABSENT) for name in each.get(kind, ())
            )
            own = {_ABSENT: lost}
        self.load_state(_joined(first, own), keeps_batches)
        if lost:
            self._warn(
                f"each of {len(states)} processes had a state of its own for {join_names(lost)} of the model, with "
                f"which {collectives.readers} cannot continue; it begins as the model was made"
            )

    def load_state(self, state: Mapping[str, Any], keeps_batches: bool = True) -> None:
        """Restore what `own` returned, see `load`."""
        buffers, generators, allocators = (dict(state.get(kind, {})) for kind in _RESTORED)
        first_or_saved = self._initial | generators
        self._restored = set()
        for name, own, key, is_weight in self._tensors():
            present, value = own.get(key), buffers.get(name)
            has_shape = value is not None and present is not None and present.shape == value.shape
            if has_shape and is_weight:
                own[key] = _placed_weight(buffers.pop(name), present)
            elif has_shape or (value is not None and keeps_batches and not is_weight):
                own[key] = _placed(buffers.pop(name), present, self._run.strategy.device)
            else:
                continue
            self._restored.add(name)
        for name, each in self._attributes():
            if name in first_or_saved and is_generator(each):
                with contextlib.suppress(TypeError, ValueError, RuntimeError, KeyError):  # another kind of generator
                    set_state_of_generator(each, first_or_saved[name])
                    generators.pop(name, None)
            elif is_rank_allocator(each):  # one that was new is so again after a rollback
                set_state_of_allocator(each, allocators.pop(name, {}), self._run.strategy.device)
        if lost := [*buffers, *generators, *allocators]:
            self._warn(f"training begins without the state that the checkpoint holds for {join_names(lost)}")
        if attributes := state.get(_ATTRIBUTES):
            logger.info(  # they may be kept to be looked at alone
                "training changes attributes that no checkpoint holds: %s; if later batches depend on them, this "
                "resume is not exact: keep them in buffers, or return them from get_extra_state",
                join_names(attributes),
            )

    def _warn(self, message: str) -> None:
        if self._run.strategy.is_main:
            warn(message)

    def _parts(self) -> Iterator[tuple[str, nn.Module, bool]]:
        """Yield the modules with prefixes of their names, and whether they are outside of the model.

        Modules of TorchScript outside of it are left out: their tensors cannot be replaced.
        """
        for path, part in self._run.model.named_modules():
            yield f"{path}." if path else "", part, False
        for number, module in enumerate(self._outside):
            for path, part in module.named_modules(prefix=f"{_OUTSIDE}{number} {type(module).__name__}"):
                if not isinstance(part, torch.jit.ScriptModule):
                    yield f"{path}.", part, True

    def _tensors(self) -> Iterator[tuple[str, dict[str, Any], str, bool]]:
        """Yield the buffers that the model's `state_dict` lacks, and the buffers and weights of modules outside of it.

        Weights that the optimizer trains are left out, of which `OutsideModules` warns. Each tensor comes as its name,
        the dict of the module that holds it, its key there, and whether it is a weight.
        """
        optimizer = self._run.optimizer
        trained = {id(each) for group in optimizer.param_groups for each in group["params"]} if optimizer else ()
        holders = [(f"{_OUTSIDE}holder {number} ", part, True) for number, part in enumerate(self._holders)]
        for prefix, part, is_outside in (*self._parts(), *holders):
            for key in sorted(part._buffers if is_outside else part._non_persistent_buffers_set):
                yield f"{prefix}{key}", part._buffers, key, False
            for key in sorted(part._parameters) if is_outside else ():
                if id(part._parameters[key]) not in trained:
                    yield f"{prefix}{key}", part._parameters, key, True

    def _attributes(self) -> Iterator[tuple[str, Any]]:
        for prefix, part, _ in self._parts():
            for key, value in [*vars(part).items()]:
                if key not in _OF_TORCH and not _is_derived(part, key):
                    yield f"{prefix}{key}", value
        yield from held_generators(self._owners, _NEAR, _has_a_rule_of_its_own)

    def _notes(self, attributes: Sequence[tuple[str, Any]]) -> dict[str, Any]:
        """Return by name what shows a later change of a buffer or an attribute."""
        walk = AttributeNotes()
        notes: dict[str, Any] = {}
        for name, value in attributes:
            with contextlib.suppress(Exception):  # such as a reference to what is gone: only a line of the log lacks it
                notes[name] = walk.note(value)
        is_compiled = self._run.strategy.static_shapes  # as each reading would be
        for name, own, key, _ in self._tensors():
            with contextlib.suppress(TypeError, ValueError, RuntimeError):  # a checkpoint cannot hold it
                value = own.get(key)
                if value is None:
                    notes[name] = ("none",)
                    continue
                refuse_unstorable(name, value)
                # Neither batch norms nor writes to `.data` count as versions.
                reads_bits = name.startswith(_OUTSIDE) or not is_compiled
                notes[name] = note_of_tensor(value), note_of_bits(value) if reads_bits else None
        return {name: note for name, note in notes.items() if note is not None}


def _has_a_rule_of_its_own(value: Any) -> bool:
    """Return whether generators in an object are found elsewhere, seeded before each sample, or the library's own."""
    kinds = (nn.Module, Dataset, DataLoader, Sampler)
    return isinstance(value, kinds) or type(value).__module__.startswith("trainer_kit.")


def _is_derived(module: nn.Module, key: str) -> bool:
    """Return whether an attribute is computed from parameters before each pass (weight norm, pruning)."""
    return any(f"{key}{end}" in module._parameters for end in ("_orig", "_g"))


def _joined(first: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Return the whole state of a reader from that of the first one and what differs."""
    absent = {*own.get(_ABSENT, ())}
    whole = {kind: {**first.get(kind, {}), **own.get(kind, {})} for kind in _RESTORED}
    kept = {kind: {name: each for name, each in values.items() if name not in absent} for kind, values in whole.items()}
    return kept | {_ATTRIBUTES: own.get(_ATTRIBUTES, first.get(_ATTRIBUTES, []))}


def _placed_weight(value: torch.Tensor, present: Any) -> Any:
    """Return a saved weight as a parameter like the present one, in its memory where that can be written."""
    try:
        with torch.no_grad():
            return present.copy_(value)
    except RuntimeError:  # a tensor of the inference mode
        value = value.to(present.device, present.dtype)
        return nn.Parameter(value, requires_grad=present.requires_grad)


def _placed(value: torch.Tensor, present: torch.Tensor | None, device: torch.device) -> torch.Tensor:
    """Return a saved buffer: in the memory of the present one if that is like it."""
    if present is None:
        return value.to(device)
    if (value.shape, value.dtype) == (present.shape, present.dtype) and (present.is_leaf or not present.requires_grad):
        with torch.no_grad(), contextlib.suppress(RuntimeError):  # expanded memory
            return present.copy_(value)
    return value.to(present.device)
