"""Size of a run's checkpoints, and the number of them that exist at the same time."""

from __future__ import annotations

import shutil
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import torch

from trainer_kit.callback import CallbackList
from trainer_kit.checkpoint import take_snapshot
from trainer_kit.checkpoint.async_saver import checkpoints_at_once
from trainer_kit.checkpoint.format.adapters import adapter_folders, frozen_names, split_state
from trainer_kit.checkpoint.format.export import model_files
from trainer_kit.memory.costs import EightBitAdam
from trainer_kit.memory.errors import first_line
from trainer_kit.planning.dry_strategy import stand_in
from trainer_kit.planning.event_steps import Cadence
from trainer_kit.planning.sections import Storage
from trainer_kit.run import Run
from trainer_kit.utils.pytree import tensors
from trainer_kit.utils.schedule_free import averaged_weights, set_training
from trainer_kit.utils.wrappers import without_wrappers


def storage_of(
    run: Run, events: CallbackList, cadence: Cadence, committed: int, without_gradient: Collection[str]
) -> Storage:
    """Return the sizes of a run's checkpoints: every tensor and the model's own files, without some kB of text.

    Args:
        run: Run at its starting point; its model has its weights.
        events: Callbacks, whose states are saved too.
        cadence: Steps of the saves.
        committed: Number of the run's checkpoints that exist already.
        without_gradient: Names of parameters for which the optimizer keeps no state.

    Raises:
        TypeError: If the model, or a state, holds something that a checkpoint cannot store.
        ValueError: If the model or a state has a name that cannot be a file name.
    """
    parts, unknown = {"weights": _weight_bytes(run)}, ""
    assert run.optimizer is not None
    try:
        parts["optimizer"] = optimizer_bytes(run.optimizer, run.model, without_gradient)
    except Exception as error:  # the optimizer may be the user's own
        unknown = f"the state of {type(run.optimizer).__name__} ({first_line(error)})"
    parts["callbacks"] = _callback_bytes(run, events)
    for name, entry in run.stateful.items():
        parts[name] = _size(run, {}, {name: entry.state_dict()})
    parts["files"] = sum(map(len, model_files(run.model, run.processing_class).values()))
    parts = {name: size for name, size in parts.items() if size}
    folder = Path(run.args.output_dir)
    return Storage(
        parts=parts,
        unknown=unknown,
        size=sum(parts.values()),
        at_once=_at_once(run, cadence, committed),
        there=committed,
        free=shutil.disk_usage(_existing(folder)).free,
        copies_folder=None if run.copies_folder is None else str(run.copies_folder),
    )


def _at_once(run: Run, cadence: Cadence, there: int) -> int | None:
    planned = cadence.planned_saves
    if planned is None and run.args.save_total_limit is None:
        return None
    return checkpoints_at_once(run, planned if planned is None else planned + there)


def _existing(folder: Path) -> Path:
    """Return the folder, or its nearest existing parent."""
    folder = folder.absolute()
    return next(each for each in (folder, *folder.parents) if each.is_dir())


def _size(run: Run, model: dict[str, torch.Tensor], states: dict[str, Any]) -> int:
    return take_snapshot(run.state.step, model, states, arguments=run.args.to_dict()).nbytes


def _weight_bytes(run: Run) -> int:
    """Return the bytes of the weights in each checkpoint: with adapters, without the frozen weights below them."""
    model = without_wrappers(run.model)
    state = model.state_dict()
    if not adapter_folders(model):
        return _size(run, state, {})
    rest, files = split_state(model, state, frozen_names(model))
    return take_snapshot(run.state.step, rest, {}, arguments=run.args.to_dict(), adapters=files).nbytes


def _callback_bytes(run: Run, events: CallbackList) -> int:
    """Return the bytes of the callbacks' states, with those of averages that training will create."""
    size = _size(run, {}, {"callbacks": events.state_dict()})
    for callback in events.callbacks:
        is_ema = any(kind.__name__ == "EMA" for kind in type(callback).__mro__)
        if is_ema and not [*tensors(callback.state_dict())]:
            size += sum(
                tensor.numel() * max(4, tensor.element_size())
                for tensor in (*run.model.parameters(), *run.model.buffers())
                if tensor.is_floating_point()
            )
    return size


def optimizer_bytes(optimizer: torch.optim.Optimizer, model: torch.nn.Module, without_gradient: Collection[str]) -> int:
    """Return the bytes of an optimizer's state after its first step.

    An optimizer of the same type takes a step with one parameter per shape and dtype: on meta tensors if it can,
    otherwise on the host.

    Args:
        optimizer: Optimizer; it stays unchanged.
        model: Model with the optimizer's parameters.
        without_gradient: Names of parameters that the optimizer skips.

    Raises:
        Exception: Any error of the optimizer's step.
    """
    idle = {parameter for name, parameter in model.named_parameters() if name in without_gradient}
    known: dict[Any, int] = {}
    total = 0
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if not parameter.requires_grad or parameter in idle:
                continue
            if kept := optimizer.state.get(parameter):  # Adagrad creates its state at the beginning
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
    except (RuntimeError, TypeError):  # it reads values
        return _stepped(optimizer, number, parameter, "cpu")


def _stepped(optimizer: torch.optim.Optimizer, number: int, parameter: torch.Tensor, device: str) -> int:
    twin = torch.zeros(parameter.shape, dtype=parameter.dtype, device=device, requires_grad=True)
    twin.grad = torch.zeros_like(twin)
    if type(optimizer).__name__ == "AdamW8bit":  # its kernels need a GPU or compilation
        return _kept_by(EightBitAdam([twin]), twin)
    other = stand_in(optimizer, [[twin] if place == number else [] for place in range(len(optimizer.param_groups))])
    for group in other.param_groups:
        group.update({name: False for name in ("fused", "foreach", "capturable") if name in group})
    return _kept_by(other, twin)


def _kept_by(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> int:
    set_training(optimizer, True)
    optimizer.step()
    with averaged_weights(optimizer):  # as in a save
        return sum(_distinct(tensors(optimizer.state[parameter])))


def _distinct(found: Iterator[torch.Tensor]) -> Iterator[int]:
    yield from {id(tensor): tensor.nbytes for tensor in found}.values()
