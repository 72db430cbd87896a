"""How large a run's checkpoints are, and how many of them are on the disk together."""

from __future__ import annotations

import shutil
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import torch

from trainer_kit.callback import CallbackList
from trainer_kit.checkpoint import pretrained_files, take_snapshot
from trainer_kit.checkpoint.async_saver import checkpoints_at_once
from trainer_kit.memory.costs import EightBitAdam
from trainer_kit.planning.dry_strategy import stand_in
from trainer_kit.planning.event_steps import Cadence
from trainer_kit.planning.sections import Storage
from trainer_kit.planning.words import said
from trainer_kit.run import Run
from trainer_kit.utils.pytree import tensors
from trainer_kit.utils.wrappers import without_wrappers


def storage_of(
    run: Run, events: CallbackList, cadence: Cadence, committed: Collection[str], without_gradient: Collection[str]
) -> Storage:
    """The checkpoints of a run: every tensor, and the model's own files; beside them come some kB of text.

    Args:
        run: Where it begins; its model has its weights.
        events: Its callbacks, whose states are saved too.
        cadence: When it saves.
        committed: Its checkpoints that are there already.
        without_gradient: Names of parameters for which the optimizer never keeps anything.

    Raises:
        TypeError: If the model, or a state, holds something that a checkpoint cannot hold.
        ValueError: If it has a name that cannot be a file's.
    """
    parts, unknown = {"weights": _size(run, without_wrappers(run.model).state_dict(), {})}, ""
    assert run.optimizer is not None
    try:
        parts["optimizer"] = optimizer_bytes(run.optimizer, run.model, without_gradient)
    except Exception as error:  # the optimizer may be the user's own
        unknown = f"the state of {type(run.optimizer).__name__} ({said(error)})"
    parts["callbacks"] = _callback_bytes(run, events)
    for name, entry in run.stateful.items():
        parts[name] = _size(run, {}, {name: entry.state_dict()})
    parts["files"] = sum(map(len, pretrained_files(run.model, run.processing_class).values()))
    parts = {name: size for name, size in parts.items() if size}
    folder = Path(run.args.output_dir)
    return Storage(
        parts=parts,
        unknown=unknown,
        size=sum(parts.values()),
        at_once=_at_once(run, cadence, len(committed)),
        there=len(committed),
        free=shutil.disk_usage(_existing(folder)).free,
    )


def _at_once(run: Run, cadence: Cadence, there: int) -> int | None:
    planned = cadence.planned_saves
    if planned is None and run.args.save_total_limit is None:
        return None
    return checkpoints_at_once(run, planned if planned is None else planned + there)


def _existing(folder: Path) -> Path:
    """The folder, or the nearest above it that is there."""
    folder = folder.absolute()
    return next(each for each in (folder, *folder.parents) if each.is_dir())


def _size(run: Run, model: dict[str, torch.Tensor], states: dict[str, Any]) -> int:
    return take_snapshot(run.state.step, model, states, arguments=run.args.to_dict()).nbytes


def _callback_bytes(run: Run, events: CallbackList) -> int:
    """What callbacks keep; of averages, which are made when training begins, what they will be."""
    size = _size(run, {}, {"callbacks": events.state_dict()})
    for callback in events.callbacks:
        if any(kind.__name__ == "EMA" for kind in type(callback).__mro__) and not any(tensors(callback.state_dict())):
            size += sum(
                tensor.numel() * max(4, tensor.element_size())
                for tensor in (*run.model.parameters(), *run.model.buffers())
                if tensor.is_floating_point()
            )
    return size


def optimizer_bytes(optimizer: torch.optim.Optimizer, model: torch.nn.Module, without_gradient: Collection[str]) -> int:
    """Bytes of an optimizer's state after its first step.

    A step is taken with one parameter of each shape and dtype, by an optimizer of the same kind: where it can on
    tensors without memory, else on the host.

    Args:
        optimizer: Stays as it is.
        model: Whose parameters it has.
        without_gradient: Names of parameters that it passes over.

    Raises:
        Exception: What a step of the optimizer raises.
    """
    idle = {parameter for name, parameter in model.named_parameters() if name in without_gradient}
    known: dict[Any, int] = {}
    total = 0
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if not parameter.requires_grad or parameter in idle:
                continue
            if kept := optimizer.state.get(parameter):  # as Adagrad has it from the beginning
                total += sum(_distinct(tensors(kept)))
                continue
            key = (number, tuple(parameter.shape), parameter.dtype)
            if key not in known:
                known[key] = _state_bytes(optimizer, number, parameter)
            total += known[key]
    return total


def _state_bytes(optimizer: torch.optim.Optimizer, number: int, parameter: torch.Tensor) -> int:
    try:
        return _stepped(optimizer, number, parameter, "meta")
    except (RuntimeError, TypeError):  # it looks at values
        return _stepped(optimizer, number, parameter, "cpu")


def _stepped(optimizer: torch.optim.Optimizer, number: int, parameter: torch.Tensor, device: str) -> int:
    twin = torch.zeros(parameter.shape, dtype=parameter.dtype, device=device, requires_grad=True)
    twin.grad = torch.zeros_like(twin)
    if type(optimizer).__name__ == "AdamW8bit":  # its kernels want a GPU, or to be compiled
        return _kept_by(EightBitAdam([twin]), twin)
    other = stand_in(optimizer, [[twin] if place == number else [] for place in range(len(optimizer.param_groups))])
    for group in other.param_groups:
        group.update({name: False for name in ("fused", "foreach", "capturable") if name in group})
    return _kept_by(other, twin)


def _kept_by(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> int:
    optimizer.step()
    return sum(_distinct(tensors(optimizer.state[parameter])))


def _distinct(found: Iterator[torch.Tensor]) -> Iterator[int]:
    yield from {id(tensor): tensor.nbytes for tensor in found}.values()
