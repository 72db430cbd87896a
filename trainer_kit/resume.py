"""What a checkpoint keeps of a run, and how a run takes it up again."""

from __future__ import annotations

import logging
import uuid
import warnings
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR

from trainer_kit.arguments import TrainingArguments
from trainer_kit.callback import Events
from trainer_kit.checkpoint import (
    CHECKPOINT_PREFIX,
    find_checkpoints,
    load_checkpoint_in_model,
    newest_valid,
    prune,
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

_BY_DEVICE = ("capturable", "foreach", "fused")
"""Options of torch's optimizers that fit the device of this start, not the one that the checkpoint was made on."""


class Checkpoints:
    """The checkpoints of one training, through all its starts.

    Args:
        run: The run to keep.
        events: Its callbacks, whose states are kept too.

    Attributes:
        run_id: The same for all starts that resume one another; only checkpoints that carry it are removed.
        data_state: Where an iterable dataset stands after the last step; None for others and between epochs.
        shifts_labels: What `Inspection.shift` found.
        resumed_from: The checkpoint that this start goes on from; None at the beginning.
        committed: This training's checkpoints, oldest first.
    """

    def __init__(self, run: Run, events: Events) -> None:
        self.run = run
        self.events = events
        self.folder = Path(run.args.output_dir)
        self.run_id = uuid.uuid4().hex
        self.data_state: dict[str, Any] | None = None
        self.shifts_labels: bool | None = None
        self.resumed_from: Path | None = None
        self._source: Path | None = None  # the same, as this process can read it
        self.committed: list[Path] = []

    @property
    def newest(self) -> Path | None:
        """The checkpoint that was committed last."""
        return self.committed[-1] if self.committed else None

    @property
    def best(self) -> Path | None:
        """The checkpoint of the best evaluation, also where the run began in another folder; None before any."""
        step = self.run.state.best_step
        if step is None:
            return None
        here = self.folder / f"{CHECKPOINT_PREFIX}{step}"
        if self.resumed_from is None or here.is_dir():
            return here
        return self.resumed_from.with_name(here.name)

    def find(self, request: bool | str | Path | None) -> None:
        """Looks for the checkpoint that is asked for and takes up where it stands.

        That comes before the schedule is made, whose length follows from it.

        Raises:
            ValueError: If it is not there, or one of another dataset, seed or optimizer, naming what differs.
        """
        run = self.run
        self.resumed_from = run.strategy.on_main(lambda: find_checkpoint(self.folder, request)) if request else None
        if self.resumed_from is None:
            return
        self._source = run.strategy.local_copy(self.resumed_from)
        if self._source != self.resumed_from and run.strategy.is_local_main:
            verify(self._source)
        trainer = read_state(self._source, "trainer")
        if trainer is None:
            raise ValueError(
                f"{self.resumed_from} holds no state of a training run; load it with load_checkpoint_in_model"
            )
        _check_same_run(run, trainer, self.resumed_from)
        run.state.load_state_dict(trainer["counters"])
        run.requests.evaluate = trainer["evaluate"]
        self.run_id = trainer["run_id"]
        self.shifts_labels = trainer["shifts_labels"]
        self.data_state = read_state(self._source, "data")

    def restore(self) -> None:
        """Takes up everything else: weights, optimizer, schedule, precision, callbacks, the user's own objects.

        What the folder holds beside is set aside: a run never mixes with another.

        Raises:
            ValueError: If it is a checkpoint of another model, naming the first tensors that differ.
        """
        run, directory = self.run, self._source
        if directory is not None:
            load_checkpoint_in_model(run.model, directory)
            _restore_optimizer(run, directory)
            if run.strategy.precision is not None:
                run.strategy.precision.load_state_dict(read_state(directory, "precision") or {})
            self.events.load_state_dict(read_state(directory, "callbacks") or {})
            _restore_stateful(run, directory)
            _report_changes(run.args, read_arguments(directory))
            self.committed = run.strategy.on_main(self._of_earlier_starts)
            logger.info("resumed from %s at step %d of %d", self.resumed_from, run.state.step, run.total_steps)
        run.strategy.on_main(lambda: set_aside(self.folder, keep=self.committed))
        run.strategy.release_copies()

    def save(self, model_state: Mapping[str, torch.Tensor], evaluation_is_due: bool = False) -> Path:
        """Commits a checkpoint of the run as it stands, then removes what is too many; all processes take part.

        Args:
            model_state: The whole model's tensors by name.
            evaluation_is_due: Whether a resume has to begin with an evaluation that was broken off.

        Returns:
            The checkpoint's folder.
        """
        strategy = self.run.strategy
        self.committed = strategy.on_main(lambda: self._commit(model_state, evaluation_is_due))
        strategy.report_progress(self.run.state.step)
        return self.committed[-1]

    def _commit(self, model_state: Mapping[str, torch.Tensor], evaluation_is_due: bool) -> list[Path]:
        run, args = self.run, self.run.args
        directory = write_checkpoint(
            self.folder,
            run.state.step,
            model_state,
            self._states(evaluation_is_due),
            arguments=args.to_dict(),
            max_shard_size=args.max_shard_size,
            world_size=run.strategy.world_size,
            extra=lambda folder: save_pretrained_files(run.model, run.processing_class, folder),
            to_host=run.strategy.to_host,
        )
        committed = [each for each in self.committed if each != directory]
        protect = {each for each in (self.resumed_from, self.best) if each is not None}
        return prune([*committed, directory], args.save_total_limit, protect)

    def load_best(self) -> None:
        """Puts the best checkpoint's weights into the model; a warning where there is none."""
        strategy = self.run.strategy
        best, is_there = strategy.on_main(lambda: (self.best, self.best is not None and self.best.is_dir()))
        if best is None or not is_there:
            why = "no evaluation gave a best one" if best is None else f"the best checkpoint, {best}, is not there"
            warnings.warn(f"load_best_model_at_end=True, but {why}: the model stays as it is", stacklevel=4)
            return
        load_checkpoint_in_model(self.run.model, strategy.local_copy(best))
        strategy.release_copies()
        logger.info("loaded the best model, %s (%s)", best, self.run.state.best_metric)

    def _states(self, evaluation_is_due: bool) -> dict[str, Any]:
        """Everything but the model's weights, by name."""
        run = self.run
        check_stateful(run)
        states: dict[str, Any] = {
            "trainer": {
                "counters": run.state.state_dict(),
                "evaluate": evaluation_is_due,
                "run_id": self.run_id,
                "shifts_labels": self.shifts_labels,
                "dataset_length": _length(run.train_dataset),
                "seed": run.args.seed,
                "optimizer": type(run.optimizer).__name__,
                "lr_scheduler": type(run.lr_scheduler).__name__,
            },
            "callbacks": self.events.state_dict(),
            "data": self.data_state,
        }
        for name in ("optimizer", "lr_scheduler"):
            states[name] = getattr(run, name).state_dict()
        if run.strategy.precision is not None:
            states["precision"] = run.strategy.precision.state_dict()
        return states | {name: entry.state_dict() for name, entry in run.stateful.items()}

    def _of_earlier_starts(self) -> list[Path]:
        """The checkpoints of this training up to where it goes on, oldest first."""
        mine = []
        for directory in find_checkpoints(self.folder):
            try:
                trainer = read_state(directory, "trainer")
            except ValueError:
                continue  # a damaged one: not this run's to judge or remove
            if trainer and trainer["run_id"] == self.run_id and trainer["counters"]["step"] <= self.run.state.step:
                mine.append(directory)
        return mine


def check_stateful(run: Run) -> None:
    """Refuses what could not be saved, before anybody has waited for the first checkpoint.

    Raises:
        TypeError: If an entry of `run.stateful` lacks `state_dict` or `load_state_dict`.
        ValueError: If it has a name that the run uses itself.
    """
    for name, entry in run.stateful.items():
        if name in OWN_STATES:
            raise ValueError(f"run.stateful[{name!r}] uses a name of the run itself; choose another than {OWN_STATES}")
        if not (hasattr(entry, "state_dict") and hasattr(entry, "load_state_dict")):
            raise TypeError(f"run.stateful[{name!r}] is a {type(entry).__name__} without state_dict or load_state_dict")


def find_checkpoint(output_dir: Path, request: bool | str | Path) -> Path | None:
    """The checkpoint that `resume_from_checkpoint` asks for; None where True finds none yet.

    Raises:
        ValueError: If a path is given that holds no valid checkpoint, saying what is wrong with it.
    """
    if request is True:
        found = newest_valid(output_dir, logger.warning)
        if found is None and find_checkpoints(output_dir):
            logger.warning("no checkpoint in %s is whole: training starts from the beginning", output_dir)
        elif found is None:
            logger.info("no checkpoint in %s yet: training starts from the beginning", output_dir)
        return found
    directory = Path(str(request))
    if not directory.is_dir():
        raise ValueError(f"resume_from_checkpoint={str(request)!r} is no folder; give a checkpoint's folder, or True")
    if find_checkpoints(directory):
        found = newest_valid(directory, logger.warning)
        if found is None:
            raise ValueError(f"resume_from_checkpoint={str(request)!r} holds no checkpoint that is whole")
        return found
    verify(directory)
    return directory


def set_aside(output_dir: Path, keep: Collection[Path] = ()) -> None:
    """Moves checkpoints that this run does not go on from into a folder of their own, so that two runs never mix.

    They are those of another run, those of this one after the step where it is taken up, and damaged ones.
    """
    found = [directory for directory in find_checkpoints(output_dir) if directory not in keep]
    if not found:
        return
    number = 1
    while (folder := output_dir / f"earlier-{number}").exists():
        number += 1
    folder.mkdir()
    for directory in found:
        directory.rename(folder / directory.name)
    logger.warning(
        "%s held %s, where this run does not go on from; now in %s (to go on with the newest use "
        "resume_from_checkpoint=True)", output_dir, ", ".join(directory.name for directory in found), folder,
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
    _check_same_kind("optimizer", run.optimizer, trainer, directory)


def _check_same_kind(role: str, made: Any, trainer: Mapping[str, Any], directory: Path) -> None:
    if (name := type(made).__name__) != trainer[role]:
        raise ValueError(
            f"the {role} is {name}, but {directory} was made with {trainer[role]}; resume with that one, or "
            "start anew with load_checkpoint_in_model(model, checkpoint)"
        )


def _restore_optimizer(run: Run, directory: Path) -> None:
    """The optimizer and its schedule, which may have another length than the one it is taken up from."""
    optimizer, scheduler = run.optimizer, run.lr_scheduler
    assert optimizer is not None
    _check_same_kind("lr_scheduler", scheduler, read_state(directory, "trainer") or {}, directory)
    saved = read_state(directory, "optimizer") or {}
    sizes = [[len(group["params"]) for group in groups] for groups in (optimizer.param_groups, saved["param_groups"])]
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"the optimizer has groups of {sizes[0]} parameters, but {directory} was made with {sizes[1]}; resume with "
            "the same parameters frozen and the same weight_decay, or start anew with "
            "load_checkpoint_in_model(model, checkpoint)"
        )
    for group, own in zip(saved["param_groups"], optimizer.param_groups, strict=True):
        group.update({name: own[name] for name in _BY_DEVICE if name in own})
    optimizer.load_state_dict(saved)
    scheduler.load_state_dict(read_state(directory, "lr_scheduler"))
    if isinstance(scheduler, LambdaLR):  # else the next step would have the rate of the former length
        for group, peak, factor in zip(optimizer.param_groups, scheduler.base_lrs, scheduler.lr_lambdas, strict=True):
            group["lr"] = peak * factor(scheduler.last_epoch)


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
