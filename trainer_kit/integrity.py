"""Whether a run can resume from a checkpoint: every value that it would take up makes sense in this run."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from trainer_kit.checkpoint.files import CheckpointError
from trainer_kit.checkpoint.format import STATE_FOLDER
from trainer_kit.checkpoint.reader import read_outline
from trainer_kit.checkpoint.trainer_state import (
    CheckedFile,
    is_count,
    is_number,
    read_data_state,
    read_ledger,
    read_trainer,
    verify_training,
)
from trainer_kit.data.loader import is_iterable
from trainer_kit.data.order import parts, ranges
from trainer_kit.optim import Schedule
from trainer_kit.optimizer_state import described_groups
from trainer_kit.run import Run

_BY_DEVICE = ("capturable", "foreach", "fused")
_MOST = 1e5
"""Times the optimizer's own option (or 1) that a saved one can be."""


def check_resumable(run: Run, directory: Path) -> None:
    """Verifies a checkpoint, and compares what it keeps with what this run can be; no tensor is read for that.

    What belongs to another training (a dataset of another length, another seed) is left to `check_same_run`.

    Args:
        run: The run, its optimizer made.
        directory: The checkpoint.

    Raises:
        CheckpointError: Naming the file and the value that makes no sense.
    """
    verify_training(directory)
    trainer = read_trainer(directory)
    assert trainer is not None
    read_ledger(directory)
    data = read_data_state(directory)
    if data is None and not is_iterable(run.train_dataset) and len(run.train_dataset) == trainer["dataset_length"]:
        _check_position(_file(directory, "trainer"), trainer["counters"], trainer["dataset_length"])
    groups = None
    if run.optimizer is not None and type(run.optimizer).__name__ == trainer["optimizer"]:
        groups = _check_optimizer(run.optimizer, directory)
    _check_schedule(trainer["lr_scheduler"], directory, groups)
    _check_precision(run, directory)
    callbacks = read_outline(directory, "callbacks")
    if not (isinstance(callbacks, dict) and all(isinstance(state, dict) for state in callbacks.values())):
        raise CheckpointError(f"{directory} is damaged: it lacks the states of callbacks")
    for name in run.stateful:
        read_outline(directory, name)


def _file(directory: Path, name: str) -> CheckedFile:
    return CheckedFile(directory / STATE_FOLDER / f"{name}.json")


def _check_position(file: CheckedFile, counters: Mapping[str, Any], length: int) -> None:
    """Compares where a map-style dataset stands with the samples that were trained on.

    In each epoch before this one less than half of the samples can have been left out (`dataloader_drop_last`).
    """
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


def _check_optimizer(optimizer: torch.optim.Optimizer, directory: Path) -> list[dict[str, Any]] | None:
    """Checks that an optimizer would take the state's options; returns its groups, None where it has none."""
    file, state = _file(directory, "optimizer"), read_outline(directory, "optimizer")
    if not isinstance(state, dict):
        raise CheckpointError(f"{file.path} is damaged or missing: it holds no state of an optimizer")
    if "param_groups" not in optimizer.state_dict():
        return None
    groups = state.get("param_groups")
    if not (isinstance(groups, list) and isinstance(state.get("state"), dict)):
        raise CheckpointError(f"{file.path} is damaged: it lacks state or param_groups")
    for number, group in enumerate(groups):
        holds = isinstance(group, dict) and isinstance(group.get("params"), list)
        file.require(holds and all(map(is_count, group["params"])), f"param_groups[{number}]", group, "with params")
        names = group.get("param_names", [""] * len(group["params"]))
        holds = (
            isinstance(names, list) and len(names) == len(group["params"]) and all(type(name) is str for name in names)
        )
        file.require(holds, f"param_groups[{number}].param_names", names, "a name for each parameter")
        _check_options(file, optimizer, group, number)
    numbers = [each for group in groups for each in group["params"]]
    is_known = len(set(numbers)) == len(numbers) and state["state"].keys() <= set(numbers)
    file.require(is_known, "state", list(state["state"]), f"of the {len(numbers)} parameters in param_groups")
    return groups


def _check_options(file: CheckedFile, optimizer: torch.optim.Optimizer, group: dict[str, Any], number: int) -> None:
    """Compares a group's options with the optimizer's own, and asks its class whether it takes them."""
    own = optimizer.param_groups[min(number, len(optimizer.param_groups) - 1)]
    options = {name: own[name] for name in own if name not in ("params", "param_names", *_BY_DEVICE)}
    parameters = inspect.signature(type(optimizer)).parameters.keys()
    for name in options.keys() & parameters & group.keys():  # the others are counters and the like of its own
        allowed = f"like the optimizer's own {own[name]!r:.40}"
        file.require(_is_alike(group[name], own[name]), f"param_groups[{number}].{name}", group[name], allowed)
    try:
        probe = _probe(optimizer, {name: options[name] for name in options.keys() & parameters})
    except Exception:  # made in a way of its own
        return
    kept = {name: value for name, value in group.items() if name != "param_names"}
    probe.load_state_dict({"state": {}, "param_groups": [{**kept, "params": [0]}]})  # adds what older versions lacked
    if lacking := options.keys() & parameters - probe.param_groups[0].keys():
        raise CheckpointError(f"{file.path} is damaged: it lacks param_groups[{number}].{min(lacking)}")
    try:
        _probe(optimizer, {name: group[name] for name in options.keys() & parameters & group.keys()})
    except Exception as error:
        raise CheckpointError(
            f"{file.path} is damaged: {type(optimizer).__name__} refuses its options: {error}"
        ) from error


def _is_alike(saved: Any, own: Any) -> bool:
    """Whether a saved option is of the kind of the one that the optimizer has: a number for a number, and so on."""
    if isinstance(own, (tuple, list)):
        return isinstance(saved, (tuple, list)) and len(saved) == len(own) and all(map(_is_alike, saved, own))
    if isinstance(own, bool) or isinstance(saved, bool):
        return saved is None or own is None or isinstance(saved, bool)
    if isinstance(own, (int, float, torch.Tensor)):
        if isinstance(saved, torch.Tensor) or isinstance(own, torch.Tensor):
            return isinstance(saved, torch.Tensor) or is_number(saved)
        most = _MOST * max(1.0, abs(own)) if math.isfinite(own) else math.inf
        return type(saved) in (int, float) and abs(saved) <= most
    return saved is None or own is None or isinstance(saved, type(own))


def _probe(optimizer: torch.optim.Optimizer, options: dict[str, Any]) -> torch.optim.Optimizer:
    """Another optimizer of this class, of a single parameter."""
    made: Any = type(optimizer)
    plain = {name: value for name, value in options.items() if not isinstance(value, torch.Tensor)}
    return made([torch.nn.Parameter(torch.zeros(1))], **plain)  # type: ignore[no-any-return]


def _check_schedule(kind: str, directory: Path, groups: list[dict[str, Any]] | None) -> None:
    """Checks that the schedule's peaks are those of the optimizer, from which its rates follow."""
    file, state = _file(directory, "lr_scheduler"), read_outline(directory, "lr_scheduler")
    if not isinstance(state, dict):
        raise CheckpointError(f"{file.path} is damaged or missing: it holds no state of a schedule")
    if kind == Schedule.__name__:
        file.check(state, {"lr_lambdas": (lambda value: isinstance(value, list), "a list")})
        if groups is not None:
            _check_peaks(directory, groups)
    if "last_epoch" in state:
        step = state["last_epoch"]
        file.require(type(step) is int and -1 <= step < 2**62, "last_epoch", step, "a whole number of at least -1")
    if "base_lrs" not in state or groups is None:
        return
    rates = state["base_lrs"]
    holds = isinstance(rates, list) and len(rates) == len(groups)
    allowed = f"a rate for each of the {len(groups)} groups"
    file.require(holds and all(is_number(each) or isinstance(each, torch.Tensor) for each in rates), "base_lrs", rates,
                 allowed)  # fmt: skip
    for rate, group in zip(rates, groups, strict=True):
        first = group.get("initial_lr", rate)
        is_same = isinstance(rate, torch.Tensor) or isinstance(first, torch.Tensor) or rate == first
        file.require(is_same, "base_lrs", rate, f"the optimizer's initial_lr, {first!r}")


def _check_peaks(directory: Path, groups: list[dict[str, Any]]) -> None:
    """Checks that the optimizer's groups have the peaks of our schedule that the saved description names."""
    file = _file(directory, "optimizer")
    try:
        described = described_groups(read_outline(directory, "optimizer") or {})
    except ValueError as error:
        raise CheckpointError(f"{file.path} is damaged: {error}") from error
    file.require(len(described) == len(groups), "param_groups", groups, f"{len(described)} groups, as described")
    for number, (group, description) in enumerate(zip(groups, described, strict=True)):
        peak, first = group.get("initial_lr"), description["rates"].get("initial_lr")
        holds = (is_number(peak) and peak == first) or (isinstance(peak, torch.Tensor) and first is not None)
        file.require(holds, f"param_groups[{number}].initial_lr", peak, f"as described, {first!r}")


def _check_precision(run: Run, directory: Path) -> None:
    """Checks the scale of fp16's gradients; its constants are torch's."""
    scaler = None if run.strategy.precision is None else run.strategy.precision.scaler
    state = read_outline(directory, "precision")
    if scaler is None or not state:
        return
    file, own = _file(directory, "precision"), scaler.state_dict()
    file.check(state, dict.fromkeys(own, (is_number, "a number")))
    file.require(state["scale"] > 0, "scale", state["scale"], "above 0")
    for name in ("growth_factor", "backoff_factor", "growth_interval"):
        file.require(state[name] == own[name], name, state[name], f"{own[name]}")
    tracker, interval = state["_growth_tracker"], own["growth_interval"]
    file.require(is_count(tracker) and tracker <= interval, "_growth_tracker", tracker, f"from 0 to {interval}, whole")
