"""Reading and validation of a Trainer's states in a checkpoint."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from trainer_kit.checkpoint.format.discovery import read_arguments, read_state, verify_files
from trainer_kit.checkpoint.format.manifest import ARGUMENTS_NAME, CHECKPOINT_PREFIX, STATE_FOLDER, Manifest
from trainer_kit.checkpoint.format.retention import Committed
from trainer_kit.errors import CheckpointError
from trainer_kit.state import TrainState

CARRIED_STATE = "carried"
"""Name of the state of what the model carries from batch to batch."""

_NAME = re.escape(CHECKPOINT_PREFIX) + r"(0|[1-9][0-9]{0,18})"
_MOST = 2**62
_MOST_IN_A_STEP = 2**28

Rule = tuple[Callable[[Any], bool], str]
"""A test of a value, and a description of the allowed values."""


def is_count(value: Any) -> bool:
    """Return whether a value is an int from 0 to 2**62 - 1."""
    return type(value) is int and 0 <= value < _MOST


def is_number(value: Any) -> bool:
    """Return whether a value is a finite int or float."""
    return type(value) in (int, float) and math.isfinite(value)


def or_none(rule: Rule) -> Rule:
    """Return a rule that also allows None."""
    return (lambda value: value is None or rule[0](value)), f"{rule[1]} or null"


COUNT: Rule = (is_count, "a whole number of at least 0")
_SIZE: Rule = (lambda value: is_count(value) and value > 0, "a whole number of at least 1")
WHOLE: Rule = (lambda value: type(value) is int, "a whole number")
_FLOAT: Rule = (lambda value: type(value) in (int, float), "a number")
_SECONDS: Rule = (lambda value: is_number(value) and value >= 0, "a number of at least 0")
BOOL: Rule = (lambda value: type(value) is bool, "true or false")
TEXT: Rule = (lambda value: type(value) is str and value != "", "a text")
OBJECT: Rule = (lambda value: isinstance(value, dict), "an object")
_LIST: Rule = (lambda value: isinstance(value, list), "a list")
_RANGE: Rule = (
    lambda value: (
        isinstance(value, (list, tuple)) and len(value) == 3 and all(map(is_count, value)) and value[1] < value[2]
    ),
    "an epoch, a position and a later one",
)
_SUM: Rule = (
    lambda value: isinstance(value, list) and len(value) == 2 and _FLOAT[0](value[0]) and _SIZE[0](value[1]),
    "a sum and a number of steps",
)
_METRIC: Rule = (lambda value: _FLOAT[0](value) and not math.isnan(value), "a number")

_COUNTERS: Mapping[str, Rule] = {
    **{field.name: COUNT for field in dataclasses.fields(TrainState) if field.name != "learning_rate"},
    "loss_sum": _FLOAT,
    "interval_loss_sum": _FLOAT,
    "grad_norm": or_none(_FLOAT),
    "best_metric": or_none(_METRIC),
    "best_step": or_none(COUNT),
    "passed_over": _LIST,
    "micro_batch": or_none(_SIZE),
    "eval_batch": or_none(_SIZE),
}
_LATER_COUNTERS: Mapping[str, Rule] = {"learning_rate": or_none(_FLOAT)}  # earlier versions did not write it
_TRAINER: Mapping[str, Rule] = {
    "counters": OBJECT,
    "evaluate": BOOL,
    "run_id": TEXT,
    "committed": _LIST,
    "shifts_labels": or_none(BOOL),
    "plan": OBJECT,
    "dataset_length": or_none(_SIZE),
    "seed": WHOLE,
    "optimizer": TEXT,
    "lr_scheduler": TEXT,
}
_KINDS = ("shuffled", "grouped", "grouped in four", "dataset", "sampler", "stream")
_FACTS: Mapping[str, Rule] = {
    "order": (lambda value: value in _KINDS, f"one of {', '.join(_KINDS)}"),
    "drop_last": BOOL,
}
_PLAN: Mapping[str, Rule] = {"processes": _SIZE, "batch_size": _SIZE, "accumulation": _SIZE, "units": OBJECT}
_FULL_SIZE: Mapping[str, Rule] = {"devices": _SIZE, "full_processes": _SIZE, "full_devices": _SIZE}
_ARGUMENTS: Mapping[str, Rule] = {
    "warmup_steps": COUNT,
    "lr_scheduler_kwargs": OBJECT,
    "seed": WHOLE,
    "dataloader_drop_last": BOOL,
}
_LEDGER: Mapping[str, Rule] = {"seconds": OBJECT, "time": _SECONDS}
_MEMBERSHIPS: Mapping[str, Rule] = {"entries": _LIST, "members": OBJECT, "full": _SIZE, "again": COUNT}
_MEMBERSHIP: Mapping[str, Rule] = {"number": _SIZE, "machines": _SIZE, "processes": _SIZE}
_TEXTS: Rule = (
    lambda value: isinstance(value, (list, tuple)) and all(type(each) is str for each in value),
    "a list of texts",
)
_MEMBERS: Mapping[str, Rule] = {
    "machines": _SIZE, "processes": _SIZE, "launch": TEXT, "number": COUNT, "hosts": _TEXTS, "launchers": _TEXTS
}  # fmt: skip
_DATA: Mapping[str, Rule] = {"workers": _LIST, "turn": COUNT}
_ORDER: dict[str, Rule] = {"order": COUNT, "sampler": (lambda value: True, "a state")}
_WORKER: Mapping[str, Rule] = {
    "batches": (
        lambda value: isinstance(value, list) and all(map(_is_run, value)),
        "numbers of batches and their size",
    ),
    "ended": BOOL,
    "mark": OBJECT,
    "digest": or_none(TEXT),
}
_MARK: Mapping[str, Rule] = {"batches": COUNT, "dataset": (lambda value: True, "a state")}


def verify_training(directory: Path, check_files: Callable[[Path], object] = verify_files) -> dict[str, Any]:
    """Verify all files of a checkpoint, and validate its trainer state and arguments.

    Args:
        directory: Folder of the checkpoint.
        check_files: Raises `CheckpointError` for a damaged file.

    Returns:
        The trainer state, as `read_trainer` returns it.

    Raises:
        CheckpointError: If the checkpoint is damaged or holds no training run; the message names the file.
    """
    check_files(directory)
    if (trainer := read_trainer(directory)) is None:
        raise CheckpointError(
            f"{directory} holds no state of a training run; load its weights with load_checkpoint_in_model"
        )
    arguments = read_arguments(directory)
    check_arguments(arguments, directory)
    file, seed = CheckedFile(directory / STATE_FOLDER / "trainer.json"), trainer["seed"]
    file.require(seed == arguments["seed"], "seed", seed, f"{arguments['seed']}, as the arguments say")
    return trainer


def read_trainer(directory: Path) -> dict[str, Any] | None:
    """Read and validate the trainer state of a checkpoint; None if no Trainer wrote it.

    Sizes and checksums are not compared, as in `read_state`.

    Raises:
        CheckpointError: If a value is missing or impossible; the message names it.
    """
    trainer = read_state(directory, "trainer")
    if trainer is None:
        return None
    file, manifest = CheckedFile(directory / STATE_FOLDER / "trainer.json"), Manifest.read(directory)
    file.check(trainer, _TRAINER)
    if "order" in trainer:  # earlier versions did not write it
        file.check(trainer, _FACTS)
    file.check(trainer["counters"], _COUNTERS, "counters.")
    if "learning_rate" in trainer["counters"]:
        file.check(trainer["counters"], _LATER_COUNTERS, "counters.")
    file.check(trainer["plan"], _PLAN, "plan.")
    if "full_processes" in trainer["plan"]:  # earlier versions did not write it
        file.check(trainer["plan"], _FULL_SIZE, "plan.")
        devices, samples = trainer["plan"]["devices"], trainer["plan"]["batch_size"]
        file.require(samples % devices == 0, "plan.devices", devices, f"a divisor of batch_size={samples}")
    processes = trainer["plan"]["processes"]  # those that read samples of their own
    allowed = f"{manifest.world_size}, as the manifest says, or a divisor of it"
    file.require(manifest.world_size % processes == 0, "plan.processes", processes, allowed)
    _check_counters(file, trainer["counters"], manifest.step)
    _check_units(file, trainer)
    _check_committed(file, trainer["committed"])
    return trainer  # type: ignore[no-any-return]


def read_committed(trainer: Mapping[str, Any]) -> list[Committed]:
    """Return the run's checkpoints in a trainer state, oldest first."""
    return [Committed(*each) for each in trainer["committed"]]


def read_ledger(directory: Path) -> dict[str, Any]:
    """Read and validate the time ledger of a checkpoint.

    Raises:
        CheckpointError: If the ledger is missing or invalid.
    """
    ledger: dict[str, Any] | None = read_state(directory, "ledger")
    file = CheckedFile(directory / STATE_FOLDER / "ledger.json")
    file.check(ledger, _LEDGER)
    assert ledger is not None
    for name in ("seconds", *(["missing"] if "missing" in ledger else [])):
        file.check(ledger, {name: OBJECT})
        file.check(ledger[name], dict.fromkeys(ledger[name], _SECONDS), f"{name}.")
    if "memberships" in ledger:  # earlier versions did not write it
        file.check(ledger["memberships"], _MEMBERSHIPS, "memberships.")
        for number, entry in enumerate(ledger["memberships"]["entries"]):
            file.check(entry, _MEMBERSHIP, f"memberships.entries[{number}].")
        members = ledger["memberships"]["members"]
        file.require(members.keys() <= _MEMBERS.keys(), "memberships.members", members, f"with {', '.join(_MEMBERS)}")
        file.check(members, {name: _MEMBERS[name] for name in members}, "memberships.members.")  # without defaults
    return ledger


def read_means(directory: Path) -> dict[str, Any]:
    """Read and validate the means since the last record in a checkpoint; empty if it holds none.

    Raises:
        CheckpointError: If they are invalid.
    """
    means: dict[str, Any] = read_state(directory, "log_means") or {}
    CheckedFile(directory / STATE_FOLDER / "log_means.json").check(means, dict.fromkeys(means, _SUM))
    return means


def read_data_state(directory: Path) -> dict[str, Any] | None:
    """Read and validate the state of an iterable dataset or a sampler; None without one.

    Raises:
        CheckpointError: If the state is invalid.
    """
    data = read_state(directory, "data")
    if data is None:
        return None
    file = CheckedFile(directory / STATE_FOLDER / "data.json")
    if isinstance(data, dict) and "order" in data:
        file.check(data, _ORDER | ({"epoch": COUNT} if "epoch" in data else {}))  # earlier versions did not write it
        return data
    if isinstance(data, dict) and [*data] == ["start"]:  # between two epochs
        return data
    file.check(data, _DATA)
    for number, worker in enumerate(data["workers"]):
        file.check(worker, _WORKER, f"workers[{number}].")
        file.check(worker["mark"], _MARK, f"workers[{number}].mark.")
        place, read = worker["mark"]["batches"], sum(count for count, _ in worker["batches"])
        file.require(
            place <= read, f"workers[{number}].mark.batches", place, f"at most {read}, the batches that were read"
        )
    file.require(data["turn"] < len(data["workers"]), "turn", data["turn"], f"below {len(data['workers'])}")
    return data  # type: ignore[no-any-return]


def read_carried(directory: Path) -> list[dict[str, Any]]:
    """Read and validate what models carry from batch to batch: a state for each reader, one for all, or none.

    Raises:
        CheckpointError: If they are invalid.
    """
    states = read_state(directory, CARRIED_STATE)
    file = CheckedFile(directory / STATE_FOLDER / f"{CARRIED_STATE}.json")
    is_list = states is None or (isinstance(states, list) and states != [])
    file.require(is_list, "its content", type(states).__name__, "a list")
    for state in states or []:
        file.check(state, {})
    return states or []


def check_arguments(arguments: Mapping[str, Any], directory: Path) -> None:
    """Validate the saved arguments that a resume compares with its own.

    Raises:
        CheckpointError: If an argument is missing or invalid.
    """
    file = CheckedFile(directory / ARGUMENTS_NAME)
    file.check(arguments, _ARGUMENTS)
    kwargs = arguments["lr_scheduler_kwargs"]
    if "num_decay_steps" in kwargs:
        file.check(kwargs, {"num_decay_steps": or_none(COUNT)}, "lr_scheduler_kwargs.")


def _is_run(value: Any) -> bool:
    """Return whether a value is a number of consecutive batches and their number of samples."""
    return isinstance(value, list) and len(value) == 2 and all(map(is_count, value))


class CheckedFile:
    """A file whose values are validated; error messages name it.

    Args:
        path: The file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def check(self, values: Any, rules: Mapping[str, Rule], prefix: str = "") -> None:
        """Check each value by its rule.

        Args:
            values: A dict of values by name.
            rules: Rules by name; all names must be present.
            prefix: Prefix of the names in error messages.

        Raises:
            CheckpointError: If `values` is no dict, lacks a name, or holds an invalid value.
        """
        if not isinstance(values, dict):
            raise CheckpointError(f"{self.path} is damaged: {prefix.rstrip('.') or 'it'} holds no object")
        for name, (holds, allowed) in rules.items():
            if name not in values:
                raise CheckpointError(f"{self.path} is damaged: it lacks {prefix}{name}")
            self.require(holds(values[name]), f"{prefix}{name}", values[name], allowed)

    def require(self, holds: bool, name: str, value: Any, allowed: str) -> None:
        """Raise CheckpointError unless `holds`.

        Args:
            holds: Whether the value is valid.
            name: Name of the value.
            value: The value.
            allowed: Description of the allowed values.

        Raises:
            CheckpointError: If `holds` is false.
        """
        if not holds:
            raise CheckpointError(f"{self.path} is damaged: {name}={value!r:.60} makes no sense; it must be {allowed}")


def _check_counters(file: CheckedFile, counters: Mapping[str, Any], step: int) -> None:
    file.require(counters["step"] == step, "counters.step", counters["step"], f"{step}, as the manifest says")
    for number, each in enumerate(counters["passed_over"]):
        file.require(_RANGE[0](each), f"counters.passed_over[{number}]", each, _RANGE[1])
    for name in ("skipped_steps", "loss_steps", "interval_steps", "best_step"):
        file.require((counters[name] or 0) <= step, f"counters.{name}", counters[name], f"at most the step, {step}")
    is_pair = (counters["best_step"] is None) == (counters["best_metric"] is None)
    file.require(is_pair, "counters.best_step", counters["best_step"], "there where best_metric is")
    skipped = len(counters["passed_over"])
    file.require(counters["rollbacks"] == skipped, "counters.rollbacks", counters["rollbacks"], f"{skipped}, the "
                  "number of ranges in passed_over")  # fmt: skip
    samples = counters["samples"]
    allowed = f"no more than the {samples} samples that were trained on"
    file.require(counters["epoch"] <= samples + skipped, "counters.epoch", counters["epoch"], allowed)
    file.require(samples >= min(step, 1), "counters.samples", samples, "at least 1 after a step")


def _check_units(file: CheckedFile, trainer: Mapping[str, Any]) -> None:
    units = trainer["plan"]["units"]
    for name, value in units.items():
        allowed = f"a whole number from 1 to {_MOST_IN_A_STEP}, the samples of a step"
        file.require(_SIZE[0](value) and value <= _MOST_IN_A_STEP, f"plan.units.{name}", value, allowed)
    file.require("warmup_steps" in units, "plan.units", units, "with warmup_steps")


def _check_committed(file: CheckedFile, committed: list[Any]) -> None:
    names = set()
    allowed = f"a name like {CHECKPOINT_PREFIX}8 in the run's own folder, a number of at least 1 and a metric"
    for each in committed:
        holds = isinstance(each, list) and len(each) == 3 and _is_name(each[0]) and each[0] not in names
        holds = holds and _SIZE[0](each[1]) and or_none(_FLOAT)[0](each[2])
        file.require(holds, "committed", each, allowed)
        names.add(each[0])


def _is_name(value: Any) -> bool:
    return type(value) is str and re.fullmatch(_NAME, value) is not None
