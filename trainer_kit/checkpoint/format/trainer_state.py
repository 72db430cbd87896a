"""What a checkpoint keeps of a Trainer's run, every value compared with what a run can have."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from trainer_kit.checkpoint.format.discovery import read_arguments, read_state, verify
from trainer_kit.checkpoint.format.manifest import ARGUMENTS_NAME, CHECKPOINT_PREFIX, STATE_FOLDER, Manifest
from trainer_kit.checkpoint.format.retention import Committed
from trainer_kit.errors import CheckpointError
from trainer_kit.state import TrainState

_NAME = re.compile(re.escape(CHECKPOINT_PREFIX) + r"(0|[1-9][0-9]{0,18})")
_MOST = 2**62
_MOST_IN_A_STEP = 2**28

Rule = tuple[Callable[[Any], bool], str]
"""Whether a value makes sense, and what it must be, for people."""


def is_count(value: Any) -> bool:
    """Whether this is a whole number from 0 on."""
    return type(value) is int and 0 <= value < _MOST


def is_number(value: Any) -> bool:
    """Whether this is a number, and a finite one."""
    return type(value) in (int, float) and math.isfinite(value)


def or_none(rule: Rule) -> Rule:
    """The same, where there may be no value."""
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
_METRIC: Rule = (lambda value: _FLOAT[0](value) and not math.isnan(value), "a number")

_COUNTERS: Mapping[str, Rule] = {
    **{field.name: COUNT for field in dataclasses.fields(TrainState)},
    "loss_sum": _FLOAT,
    "interval_loss_sum": _FLOAT,
    "grad_norm": or_none(_FLOAT),
    "best_metric": or_none(_METRIC),
    "best_step": or_none(COUNT),
    "passed_over": _LIST,
    "micro_batch": or_none(_SIZE),
    "eval_batch": or_none(_SIZE),
}
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
_PLAN: Mapping[str, Rule] = {"processes": _SIZE, "batch_size": _SIZE, "accumulation": _SIZE, "units": OBJECT}
_ARGUMENTS: Mapping[str, Rule] = {
    "warmup_steps": COUNT,
    "lr_scheduler_kwargs": OBJECT,
    "seed": WHOLE,
    "dataloader_drop_last": BOOL,
}
_LEDGER: Mapping[str, Rule] = {"seconds": OBJECT, "time": _SECONDS}
_DATA: Mapping[str, Rule] = {"workers": _LIST, "turn": COUNT}
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


def verify_training(directory: Path) -> dict[str, Any]:
    """Compares every file with the manifest, and what is kept of the run with what a run can be.

    Returns:
        What `read_trainer` does.

    Raises:
        CheckpointError: Naming the file and what is wrong with it.
    """
    verify(directory)
    if (trainer := read_trainer(directory)) is None:
        raise CheckpointError(
            f"{directory} holds no state of a training run; load its weights with load_checkpoint_in_model"
        )
    arguments = read_arguments(directory)
    check_arguments(arguments, directory)
    file, seed, length = (
        CheckedFile(directory / STATE_FOLDER / "trainer.json"),
        trainer["seed"],
        trainer["dataset_length"],
    )
    file.require(seed == arguments["seed"], "seed", seed, f"{arguments['seed']}, as the arguments say")
    if length is not None and not arguments["dataloader_drop_last"]:
        epoch_length = trainer["counters"]["epoch_length"]
        allowed = f"{epoch_length}, the samples of an epoch, since dataloader_drop_last is not set"
        file.require(length == epoch_length, "dataset_length", length, allowed)
    return trainer


def read_trainer(directory: Path) -> dict[str, Any] | None:
    """The counters and facts of the run in a checkpoint; None where it is no Trainer's.

    Sizes and checksums are not compared, as in `read_state`.

    Raises:
        CheckpointError: If a value is missing or is none that a run can have, naming it.
    """
    trainer = read_state(directory, "trainer")
    if trainer is None:
        return None
    file, manifest = CheckedFile(directory / STATE_FOLDER / "trainer.json"), Manifest.read(directory)
    file.check(trainer, _TRAINER)
    file.check(trainer["counters"], _COUNTERS, "counters.")
    file.check(trainer["plan"], _PLAN, "plan.")
    processes, allowed = trainer["plan"]["processes"], f"{manifest.world_size}, as the manifest says"
    file.require(processes == manifest.world_size, "plan.processes", processes, allowed)
    _check_counters(file, trainer["counters"], manifest.step)
    _check_units(file, trainer)
    _check_committed(file, trainer["committed"])
    return trainer  # type: ignore[no-any-return]


def read_committed(trainer: Mapping[str, Any]) -> list[Committed]:
    """The run's checkpoints up to this one, oldest first."""
    return [Committed(*each) for each in trainer["committed"]]


def read_ledger(directory: Path) -> dict[str, Any]:
    """Where the time of the run went up to a checkpoint.

    Raises:
        CheckpointError: If that is missing or makes no sense.
    """
    ledger: dict[str, Any] | None = read_state(directory, "ledger")
    file = CheckedFile(directory / STATE_FOLDER / "ledger.json")
    file.check(ledger, _LEDGER)
    assert ledger is not None
    file.check(ledger["seconds"], dict.fromkeys(ledger["seconds"], _SECONDS), "seconds.")
    return ledger


def read_data_state(directory: Path) -> dict[str, Any] | None:
    """Where an iterable dataset stands; None for others and between epochs.

    Raises:
        CheckpointError: If that makes no sense.
    """
    data = read_state(directory, "data")
    if data is None:
        return None
    file = CheckedFile(directory / STATE_FOLDER / "data.json")
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


def check_arguments(arguments: Mapping[str, Any], directory: Path) -> None:
    """Refuses arguments that a resume cannot compare with its own.

    Raises:
        CheckpointError: If one is missing or makes no sense.
    """
    file = CheckedFile(directory / ARGUMENTS_NAME)
    file.check(arguments, _ARGUMENTS)
    kwargs = arguments["lr_scheduler_kwargs"]
    if "num_decay_steps" in kwargs:
        file.check(kwargs, {"num_decay_steps": or_none(COUNT)}, "lr_scheduler_kwargs.")


def _is_run(value: Any) -> bool:
    """Whether this says of batches that came one after the other how many they are, and of how many samples each."""
    return isinstance(value, list) and len(value) == 2 and all(map(is_count, value))


class CheckedFile:
    """The file that values are read from, for the sentences about them."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def check(self, values: Any, rules: Mapping[str, Rule], prefix: str = "") -> None:
        """Compares each value with its rule."""
        if not isinstance(values, dict):
            raise CheckpointError(f"{self.path} is damaged: {prefix.rstrip('.') or 'it'} holds no object")
        for name, (holds, allowed) in rules.items():
            if name not in values:
                raise CheckpointError(f"{self.path} is damaged: it lacks {prefix}{name}")
            self.require(holds(values[name]), f"{prefix}{name}", values[name], allowed)

    def require(self, holds: bool, name: str, value: Any, allowed: str) -> None:
        """Raises where a value is none that it can be."""
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
    return type(value) is str and _NAME.fullmatch(value) is not None
