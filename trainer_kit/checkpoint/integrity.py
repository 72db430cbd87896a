"""Validation of a checkpoint before a run resumes from it.

A checkpoint counts as damaged only if it holds a value that trainer_kit or torch's optimizers never write. States of
the user's own classes are not checked. If such a state does not fit, loading raises, and no older checkpoint is tried.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from numbers import Real
from pathlib import Path
from typing import Any

import torch

from trainer_kit.checkpoint.format.discovery import read_arguments, read_outline, verify_files
from trainer_kit.checkpoint.format.manifest import STATE_FOLDER, Manifest
from trainer_kit.checkpoint.format.model_values import values_name
from trainer_kit.checkpoint.format.trainer_state import (
    COUNT,
    OBJECT,
    CheckedFile,
    Rule,
    is_number,
    read_carried,
    read_data_state,
    read_ledger,
    verify_training,
)
from trainer_kit.data.sampling import parts, ranges
from trainer_kit.data.source import data_source, order_facts
from trainer_kit.errors import CheckpointError
from trainer_kit.run import Run
from trainer_kit.strategies.base import Strategy
from trainer_kit.utils.optimizer_state import described_groups

_NUMBERS = ("eps", "weight_decay", "momentum", "dampening", "alpha", "rho", "lr_decay", "momentum_decay")
_PAIRS = ("betas", "etas", "step_sizes")
_FLAGS = ("amsgrad", "maximize", "nesterov", "centered", "differentiable", "decoupled_weight_decay")
"""Options of torch's optimizers that are true or false."""

_MOST = 1e5
_POSITIVE: Rule = (lambda value: is_number(value) and value > 0, "above 0")
_SCALER: Mapping[str, Rule] = {
    **dict.fromkeys(("scale", "growth_factor", "backoff_factor", "growth_interval"), _POSITIVE),
    "_growth_tracker": COUNT,
}


def fetch_verified(strategy: Strategy, directory: Path) -> Path:
    """Return the main process's checkpoint, or a verified copy of it if this process cannot read it. Collective.

    Args:
        strategy: Strategy that is set up.
        directory: Folder of a checkpoint that the main process has verified.

    Raises:
        CheckpointError: If the copy is damaged.
    """
    source = strategy.session.fetch_checkpoint(directory)
    if source != directory and strategy.collectives.is_local_main:
        Manifest.read(source).check(source)  # the base of adapters is not copied
    return source


def check_resumable(run: Run, directory: Path, check_files: Callable[[Path], object] = verify_files) -> None:
    """Verify a checkpoint, and check that its states are possible for this run; no tensor is loaded.

    `check_same_run` compares dataset and seed.

    Args:
        run: The run, with its optimizer.
        directory: Folder of the checkpoint.
        check_files: See `verify_training`.

    Raises:
        CheckpointError: If the checkpoint is damaged; the message names the file and the invalid value.
    """
    trainer = verify_training(directory, check_files)
    read_ledger(directory)
    data = read_data_state(directory)
    source = data_source("train_dataset", run.train_dataset, run.train_sampler)
    file, facts = _file(directory, "trainer"), order_facts(source, run.args)
    drops = trainer.get("drop_last", read_arguments(directory)["dataloader_drop_last"])
    has_own_order = trainer.get("order", facts["order"]) in ("sampler", "stream")
    if not (has_own_order or drops):
        length, epoch_length = trainer["dataset_length"], trainer["counters"]["epoch_length"]
        allowed = f"{epoch_length}, the samples of an epoch, since dataloader_drop_last is not set"
        file.require(length in (None, epoch_length), "dataset_length", length, allowed)
    if data is None and not has_own_order and source.length == trainer["dataset_length"]:
        _check_position(file, trainer["counters"], trainer["dataset_length"])
    _check_optimizer(run.optimizer, trainer["optimizer"], directory)
    if not (directory / STATE_FOLDER / "lr_scheduler.json").exists():
        raise CheckpointError(f"{directory} is damaged: it lacks the state of the schedule")
    read_outline(directory, "lr_scheduler")
    _check_precision(run, directory)
    callbacks = read_outline(directory, "callbacks")
    if not isinstance(callbacks, dict):
        raise CheckpointError(f"{directory} is damaged: it lacks the states of callbacks")
    for name in (*run.stateful, values_name()):
        read_outline(directory, name)
    read_carried(directory)


def _file(directory: Path, name: str) -> CheckedFile:
    return CheckedFile(directory / STATE_FOLDER / f"{name}.json")


def _check_position(file: CheckedFile, counters: Mapping[str, Any], length: int) -> None:
    """Check that a map-style dataset's position fits the trained samples; epochs drop less than half of theirs."""
    epoch, position, cut = counters["epoch"], counters["position"], counters["passed_over"]
    file.require(counters["epoch_length"] <= length, "counters.epoch_length", counters["epoch_length"],
                 f"at most the {length} samples of the dataset")  # fmt: skip
    file.require(position < length, "counters.position", position, f"below the {length} samples of an epoch")
    here = _trained(0, position, ranges(cut, epoch))
    earlier = {number for number, _, _ in cut if number < epoch}
    whole = (epoch - len(earlier)) * length + sum(_trained(0, length, ranges(cut, number)) for number in earlier)
    least, most = whole - epoch * ((length - 1) // 2) + here, whole + here
    samples = counters["samples"]
    allowed = f"as many as lie before epoch={epoch}, position={position}: {max(0, least)} to {most}"
    file.require(least <= samples <= most, "counters.samples", samples, allowed)


def _trained(start: int, stop: int, cut: list[tuple[int, int]]) -> int:
    return sum(last - first for first, last in parts(start, stop, cut))


def _check_optimizer(optimizer: torch.optim.Optimizer | None, kind: str, directory: Path) -> None:
    """Check the description of the parameters, and for a torch optimizer the groups and their options."""
    file, state = _file(directory, "optimizer"), read_outline(directory, "optimizer")
    if not isinstance(state, dict):
        raise CheckpointError(f"{file.path} is damaged or missing: it holds no state of an optimizer")
    try:
        described = described_groups(state)
    except ValueError as error:
        raise CheckpointError(f"{file.path} is damaged: {error}") from error
    is_torchs = type(optimizer).__module__.startswith("torch.optim.") and type(optimizer).__name__ == kind
    if optimizer is None or not is_torchs:
        return
    file.check(state, {"state": OBJECT, "param_groups": (lambda value: isinstance(value, list), "a list")})
    groups, first = state["param_groups"], 0
    file.require(len(groups) == len(described), "param_groups", groups, f"{len(described)} groups")
    for number, (group, other) in enumerate(zip(groups, described, strict=True)):
        count = len(other["params"])
        holds = isinstance(group, dict) and group.get("params") == [*range(first, first + count)]
        file.require(holds, f"param_groups[{number}]", group, f"with the {count} parameters from {first} on")
        names, same = group.get("param_names"), [each.get("name") for each in other["params"]]
        file.require(
            (names or [None] * count) == same, f"param_groups[{number}].param_names", names, f"{same}, as described"
        )
        _check_rates(file, group, other["rates"], number)
        _check_options(file, optimizer, group, number)
        first += count
    keys = [*state["state"]]
    holds = all(type(each) is int and 0 <= each < first for each in keys)
    file.require(holds, "state", keys, f"with numbers of the {first} parameters in param_groups as keys")


def _check_rates(file: CheckedFile, group: Mapping[str, Any], rates: Mapping[str, Any], number: int) -> None:
    """Check that a group's learning rates equal those in the description."""
    for name in ("lr", "initial_lr"):
        rate, same = group.get(name), rates.get(name)
        if not isinstance(rate, torch.Tensor):  # a tensor is on "meta", without its value
            file.require(repr(rate) == repr(same), f"param_groups[{number}].{name}", rate, f"{same!r}, as described")


def _check_options(file: CheckedFile, optimizer: torch.optim.Optimizer, group: Mapping[str, Any], number: int) -> None:
    own = optimizer.param_groups[min(number, len(optimizer.param_groups) - 1)]
    for name in (*_NUMBERS, *_PAIRS, *_FLAGS):
        if name not in optimizer.defaults or name not in own:
            continue
        if name not in group:
            raise CheckpointError(f"{file.path} is damaged: it lacks param_groups[{number}].{name}")
        value, place = group[name], f"param_groups[{number}].{name}"
        if name in _FLAGS:
            holds, allowed = value is own[name] or (isinstance(value, int) and value in (0, 1)), "true or false"
        elif name in _PAIRS:
            holds, allowed = isinstance(value, (tuple, list)) and len(value) == len(own[name]), "two numbers"
            holds = holds and all(map(_is_number, value, own[name]))
        else:
            holds, allowed = _is_number(value, own[name]), f"a number from 0 to {_MOST:g}"
        file.require(holds, place, value, allowed)


def _is_number(value: Any, own: Any) -> bool:
    """Return whether a torch optimizer takes this value; any value passes if the run's own option is no number."""
    if isinstance(value, torch.Tensor) or isinstance(own, bool) or not isinstance(own, Real):
        return True
    if isinstance(value, bool) or not isinstance(value, Real):
        return False
    return value == own or (math.isfinite(value) and 0 <= float(value) <= _MOST)


def _check_precision(run: Run, directory: Path) -> None:
    """Check the state of fp16's gradient scaler."""
    scaler = None if run.strategy.precision is None else run.strategy.precision.scaler
    state = read_outline(directory, "precision")
    if scaler is not None and state:
        _file(directory, "precision").check(state, _SCALER)
