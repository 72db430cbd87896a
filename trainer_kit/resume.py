"""What a checkpoint keeps of a run, and how a run takes it up again."""

from __future__ import annotations

import dataclasses
import logging
import uuid
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from trainer_kit.arguments import TrainingArguments
from trainer_kit.callback import Events
from trainer_kit.checkpoint import (
    find_checkpoints,
    load_checkpoint_in_model,
    newest_valid,
    read_arguments,
    read_state,
    verify,
    write_checkpoint,
)
from trainer_kit.checkpoint.export import save_pretrained_files
from trainer_kit.run import Run

logger = logging.getLogger("trainer_kit")

OWN_STATES = ("trainer", "optimizer", "lr_scheduler", "precision", "callbacks", "data")
"""Names that `run.stateful` may not use."""

_IN_THE_OPTIMIZER = ("learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon")
"""Arguments whose value the checkpoint's optimizer brings along."""


@dataclasses.dataclass
class Thread:
    """What runs through all starts of one training, beside the Run itself.

    Attributes:
        run_id: The same for all starts that resume one another; retention removes only checkpoints that carry it.
        data_state: Where an iterable dataset stands after the last step; None for others and between epochs.
        shifts_labels: What `Loss.inspect` found.
    """

    run_id: str = dataclasses.field(default_factory=lambda: uuid.uuid4().hex)
    data_state: dict[str, Any] | None = None
    shifts_labels: bool | None = None


def collect_states(run: Run, events: Events, thread: Thread) -> dict[str, Any]:
    """Everything but the model's weights, by name.

    Raises:
        ValueError: If an entry of `run.stateful` has a name that the run uses itself.
    """
    states: dict[str, Any] = {
        "trainer": {
            "counters": run.state.state_dict(),
            "evaluate": run.requests.evaluate,
            "run_id": thread.run_id,
            "shifts_labels": thread.shifts_labels,
            "dataset_length": _length(run.train_dataset),
            "seed": run.args.seed,
            "optimizer": type(run.optimizer).__name__,
        },
        "callbacks": events.state_dict(),
        "data": thread.data_state,
    }
    for name in ("optimizer", "lr_scheduler"):
        states[name] = getattr(run, name).state_dict()
    if run.strategy.precision is not None:
        states["precision"] = run.strategy.precision.state_dict()
    for name, entry in run.stateful.items():
        if name in OWN_STATES:
            raise ValueError(f"run.stateful[{name!r}] uses a name of the run itself; choose another than {OWN_STATES}")
        states[name] = entry.state_dict()
    return states


def save_checkpoint(run: Run, model_state: Mapping[str, torch.Tensor], events: Events, thread: Thread) -> Path:
    """Commits a checkpoint of the run as it stands and returns its folder."""
    return write_checkpoint(
        Path(run.args.output_dir),
        run.state.step,
        model_state,
        collect_states(run, events, thread),
        arguments=run.args.to_dict(),
        max_shard_size=run.args.max_shard_size,
        world_size=run.strategy.world_size,
        extra=lambda folder: save_pretrained_files(run.model, run.processing_class, folder),
    )


def find_checkpoint(output_dir: Path, request: bool | str | Path) -> Path | None:
    """The checkpoint that `resume_from_checkpoint` asks for; None where True finds none yet.

    Raises:
        ValueError: If a path is given that holds no valid checkpoint, saying what is wrong with it.
    """
    if request is True:
        found = newest_valid(output_dir, logger.warning)
        if found is None:
            logger.info("no checkpoint in %s yet: training starts from the beginning", output_dir)
        return found
    directory = Path(str(request))
    if not directory.is_dir():
        raise ValueError(f"resume_from_checkpoint={str(request)!r} is no folder; give a checkpoint's folder, or True")
    if find_checkpoints(directory):
        return newest_valid(directory, logger.warning)
    verify(directory)
    return directory


def restore_counters(run: Run, thread: Thread, directory: Path) -> None:
    """Takes up where a checkpoint stands; before the schedule is made, whose length follows from it.

    Raises:
        ValueError: If it is a checkpoint of another dataset, seed or optimizer, naming what differs.
    """
    trainer = read_state(directory, "trainer")
    if trainer is None:
        raise ValueError(f"{directory} holds no state of a training run; load it with load_checkpoint_in_model")
    _check_same_run(run, trainer, directory)
    run.state.load_state_dict(trainer["counters"])
    run.requests.evaluate = trainer["evaluate"]
    thread.run_id = trainer["run_id"]
    thread.shifts_labels = trainer["shifts_labels"]
    thread.data_state = read_state(directory, "data")


def restore(run: Run, events: Events, directory: Path) -> None:
    """Takes up everything else: weights, optimizer, schedule, precision, callbacks, the user's own objects.

    Raises:
        ValueError: If it is a checkpoint of another model, naming the first tensors that differ.
    """
    load_checkpoint_in_model(run.model, directory)
    for name in ("optimizer", "lr_scheduler"):
        getattr(run, name).load_state_dict(read_state(directory, name))
    if run.strategy.precision is not None:
        run.strategy.precision.load_state_dict(read_state(directory, "precision") or {})
    events.load_state_dict(read_state(directory, "callbacks") or {})
    _restore_stateful(run, directory)
    _report_changes(run.args, read_arguments(directory))


def earlier_checkpoints(output_dir: Path, thread: Thread, step: int) -> list[Path]:
    """The checkpoints of this run's earlier starts up to `step`, oldest first."""
    mine = []
    for directory in find_checkpoints(output_dir):
        try:
            trainer = read_state(directory, "trainer")
        except ValueError:
            continue  # a damaged one: not this run's to judge or remove
        if trainer and trainer["run_id"] == thread.run_id and trainer["counters"]["step"] <= step:
            mine.append(directory)
    return mine


def set_aside(output_dir: Path) -> None:
    """Moves the checkpoints of an earlier run into a folder of their own, so that two runs never mix."""
    found = find_checkpoints(output_dir)
    if not found:
        return
    number = 1
    while (folder := output_dir / f"earlier-{number}").exists():
        number += 1
    folder.mkdir()
    for directory in found:
        directory.rename(folder / directory.name)
    logger.warning(
        "%s held %d checkpoints of an earlier run, now in %s; to go on with a run use resume_from_checkpoint=True",
        output_dir, len(found), folder,
    )  # fmt: skip


def _check_same_run(run: Run, trainer: Mapping[str, Any], directory: Path) -> None:
    length, saved = _length(run.train_dataset), trainer["dataset_length"]
    if length != saved:
        raise ValueError(
            f"train_dataset has {length} samples, but {directory} was made with {saved}: which were seen cannot be "
            "told; give the same dataset, or start anew with load_checkpoint_in_model(model, checkpoint)"
        )
    if run.args.seed != trainer["seed"]:
        raise ValueError(
            f"seed={run.args.seed}, but {directory} was made with seed={trainer['seed']}: the order of samples would "
            "change; resume with the same seed"
        )
    if (name := type(run.optimizer).__name__) != trainer["optimizer"]:
        raise ValueError(
            f"the optimizer is {name}, but {directory} was made with {trainer['optimizer']}; resume with that one, or "
            "start anew with load_checkpoint_in_model(model, checkpoint)"
        )


def _length(dataset: Any) -> int | None:
    return len(dataset) if hasattr(dataset, "__len__") else None


def _restore_stateful(run: Run, directory: Path) -> None:
    for name, entry in run.stateful.items():
        state = read_state(directory, name)
        if state is None:
            warnings.warn(f"{directory} holds nothing for run.stateful[{name!r}]; it stays as it is", stacklevel=2)
        else:
            entry.load_state_dict(state)


def _report_changes(args: TrainingArguments, saved: Mapping[str, Any]) -> None:
    """One sentence about arguments that are not as they were, and one about those that have no effect any more."""
    now = args.to_dict()
    changed = {name: (saved[name], now[name]) for name in now if name in saved and saved[name] != now[name]}
    kept = [name for name in changed if name in _IN_THE_OPTIMIZER]
    told = [f"{name} {old!r} -> {new!r}" for name, (old, new) in changed.items() if name not in kept]
    if told:
        logger.info("resumed with other arguments: %s", ", ".join(told))
    if kept:
        logger.warning(
            "%s changed, but the optimizer goes on with the checkpoint's values; start anew from the weights to change "
            "them", ", ".join(f"{name} {changed[name][0]!r} -> {changed[name][1]!r}" for name in kept),
        )  # fmt: skip
