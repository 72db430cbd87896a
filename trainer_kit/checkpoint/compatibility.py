"""Compatibility of a run with the checkpoint that it resumes from, and a report of the changes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau

from trainer_kit.checkpoint import find_checkpoints, newest_valid, read_state, verify
from trainer_kit.checkpoint.format.discovery import is_of_transformers, read_arguments
from trainer_kit.checkpoint.format.manifest import MANIFEST_NAME
from trainer_kit.checkpoint.format.trainer_state import read_trainer
from trainer_kit.checkpoint.generations import has_state
from trainer_kit.checkpoint.optimizer_states import NEW_RUN, read_optimizer_state
from trainer_kit.config.arguments import TrainingArguments
from trainer_kit.data.reader import check_workers
from trainer_kit.data.run_length import RunLength, step_numbers
from trainer_kit.data.sampling import Layout, saved_layout
from trainer_kit.data.source import data_length, data_source, order_facts
from trainer_kit.errors import CheckpointError
from trainer_kit.optim import Schedule, set_rate
from trainer_kit.run import Run
from trainer_kit.utils.box import Placement, unsharded
from trainer_kit.utils.run_lock import holder_of
from trainer_kit.utils.units import describe_shares, format_count
from trainer_kit.utils.user_warnings import warn

logger = logging.getLogger("trainer_kit")

_IN_THE_OPTIMIZER = ("learning_rate", "layer_lr_decay", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon")
"""Arguments whose value the checkpoint's optimizer restores."""

_IN_THE_LAYOUT = ("per_device_train_batch_size", "gradient_accumulation_steps")
"""Arguments that the message about the layout covers."""

_OF_THE_SCHEDULE = ("lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "warmup_ratio")
"""Arguments of a schedule by name, which has no state but its step."""

_OF_THE_START = ("resume_from_checkpoint", "do_train", "do_eval", "do_predict")
"""Arguments that differ between the starts of a run."""

_OF_THE_BEST = ("metric_for_best_model", "greater_is_better")
"""Arguments by which checkpoints are compared."""

_OF_THE_PLATEAU = ("best", "mode", "mode_worse", "num_bad_epochs")
"""State of torch's `ReduceLROnPlateau` that belongs to its metric."""

_ORDERS = {
    "shuffled": "shuffled samples",
    "grouped": "samples grouped by length",
    "grouped in four": "samples in four groups by length",
    "dataset": "the dataset's order",
    "sampler": "a sampler",
    "stream": "an iterable dataset",
}


def default_request(args: TrainingArguments, restarts: int) -> bool | str | None:
    """Return what a start resumes from if the caller of `train` does not say.

    Args:
        args: The arguments of the run.
        restarts: How often a launcher has restarted the run.
    """
    if restarts > 0 and (args.resume_from_checkpoint is None or has_state(Path(args.output_dir))):
        return True  # what an earlier start has saved comes before what that one began from
    return args.resume_from_checkpoint


def read_request(request: bool | str | Path | None) -> bool | str | Path | None:
    """Return what `resume_from_checkpoint` requests; a command line gives True and False as words."""
    words: dict[Any, bool] = {"True": True, "true": True, "False": False, "false": False}
    return words.get(request, request)


def find_checkpoint(
    output_dir: Path,
    request: bool | str | Path,
    repair: bool = True,
    check: Callable[[Path], object] = verify,
) -> Path | None:
    """Return the checkpoint that `resume_from_checkpoint` requests; None if it is True and there is none.

    Args:
        output_dir: Folder of the run.
        request: True for the newest valid checkpoint in `output_dir`, or the folder of a checkpoint or run.
        repair: Whether to restore a checkpoint that a killed run moved aside (see `newest_valid`).
        check: Raises `CheckpointError` for a checkpoint that this run cannot resume from.

    Raises:
        ValueError: If the given path holds no valid checkpoint.
    """
    if request is True:
        found = newest_valid(output_dir, logger.warning, repair=repair, check=check)
        if found is None and find_checkpoints(output_dir):
            logger.warning(
                "no checkpoint in %s is valid: training starts from the beginning, and moves them to earlier-N/ there",
                output_dir,
            )
        elif found is None:
            logger.info("no checkpoint in %s yet: training starts from the beginning", output_dir)
        return found
    given = f"resume_from_checkpoint={str(request)!r}"
    directory = Path(str(request)).expanduser().absolute()
    if not directory.is_dir():
        what = "is a file" if directory.exists() else "does not exist"
        raise ValueError(
            f"{given} {what}; give a checkpoint's folder, the output_dir of a run to resume from its newest "
            f"checkpoint, or True for the newest one in output_dir={str(output_dir)!r}{_others(output_dir)}"
        )
    if (directory / MANIFEST_NAME).exists():
        check(directory)
        return directory
    there = find_checkpoints(directory)
    if not there:
        raise ValueError(
            f"{given} holds no checkpoint: it has neither a {MANIFEST_NAME} nor folders named checkpoint-STEP; give a "
            f"checkpoint's folder, or the output_dir of a run{_others(output_dir)}{_of_transformers([directory])}"
        )
    repair = repair and holder_of(directory) is None
    found = newest_valid(directory, logger.warning, repair=repair, check=check)
    if found is None:
        raise ValueError(
            f"{given} holds no valid checkpoint (the log says why of each of the {len(there)}); give another "
            f"folder, or leave it out to start from the beginning{_of_transformers(there)}"
        )
    return found


def _of_transformers(directories: Sequence[Path]) -> str:
    """Say how to begin with the newest of these folders that transformers' Trainer wrote."""
    for directory in reversed(directories):
        if is_of_transformers(directory):
            return (
                f"; {directory} is a checkpoint of transformers' Trainer, whose optimizer state is a pickle that is "
                f"not read: Trainer(weights={str(directory)!r}) begins with its weights"
            )
    return ""


def _others(output_dir: Path) -> str:
    """Name the last existing checkpoints, for a user who misspelled one."""
    names = [directory.name for directory in find_checkpoints(output_dir)]
    return f"; there are {', '.join(names[-3:])} in {output_dir}" if names else ""


def check_same_run(run: Run, trainer: Mapping[str, Any], data_state: Mapping[str, Any] | None, directory: Path) -> None:
    """Check that a checkpoint belongs to the same training as the run.

    Args:
        run: The run, with its optimizer.
        trainer: The checkpoint's trainer state.
        data_state: The checkpoint's state of an iterable dataset; None without one.
        directory: Folder of the checkpoint.

    Raises:
        ValueError: If the dataset's length, seed, optimizer class or number of workers differ; names both.
    """
    length, saved = data_length(run.train_dataset), trainer["dataset_length"]
    if length != saved:
        raise ValueError(
            f"train_dataset has {length} samples, but {directory} was made with {saved}: which of them were seen is "
            f"unknown; give the same dataset, or {NEW_RUN}"
        )
    if run.args.seed != trainer["seed"]:
        raise ValueError(
            f"seed={run.args.seed}, but {directory} was made with seed={trainer['seed']}: the order of samples would "
            "change; resume with the same seed"
        )
    source = data_source("train_dataset", run.train_dataset, run.train_sampler)
    if data_state is not None and "workers" in data_state:
        check_workers(len(data_state["workers"]), 0 if source.is_ready else run.args.dataloader_num_workers)
    _check_same_kind("optimizer", run.optimizer, trainer, directory)


def check_same_order(run: Run, trainer: Mapping[str, Any], directory: Path) -> None:
    """Check that a run continues the order of samples of a checkpoint from the middle of an epoch.

    Args:
        run: The run.
        trainer: The checkpoint's trainer state.
        directory: Folder of the checkpoint.

    Raises:
        ValueError: If the checkpoint has another kind of order; names both.
    """
    source = data_source("train_dataset", run.train_dataset, run.train_sampler)
    now = order_facts(source, run.args)["order"]
    before = trainer.get("order", now)  # earlier versions did not write it
    if trainer["counters"]["position"] and now != before:
        raise ValueError(
            f"the run has {_ORDERS[now]}, but {directory} was made with {_ORDERS[before]}, in the middle of an epoch: "
            f"the order of samples would change; resume with the same one, or {NEW_RUN}"
        )


def _check_same_kind(role: str, made: Any, trainer: Mapping[str, Any], directory: Path) -> None:
    if (name := type(made).__name__) != trainer[role]:
        raise ValueError(
            f"the {role} is {name}, but {directory} was made with {trainer[role]}; resume with that one, or {NEW_RUN}"
        )


def fitting_optimizer_state(run: Run, directory: Path, placement: Placement = unsharded) -> dict[str, Any]:
    """Check that the optimizer's state in a checkpoint fits the run, and read it.

    The run stays unchanged but for the order of parameters in the optimizer's groups, which becomes the checkpoint's.

    Args:
        run: The run, with its optimizer.
        directory: Folder of the checkpoint.
        placement: See `read_optimizer_state`.

    Raises:
        CheckpointError: If the state is damaged or missing.
        ValueError: If the state belongs to other parameters, or the schedule has another class.
    """
    assert run.optimizer is not None
    _check_same_kind("lr_scheduler", run.lr_scheduler, read_state(directory, "trainer") or {}, directory)
    names = run.strategy.parameter_names(run.model)
    state = read_optimizer_state(directory, "optimizer", run.optimizer, names, placement)
    if state is None:
        raise CheckpointError(f"{directory} is damaged: it holds no state of the optimizer")
    return state


def read_judged(args: TrainingArguments, saved: Mapping[str, Any], directory: Path) -> dict[str, Any]:
    """Read the trainer state to resume from; without what another metric than that of `args` has judged.

    Args:
        args: The arguments of the run.
        saved: The arguments in the checkpoint.
        directory: Folder of the checkpoint.

    Raises:
        CheckpointError: As for `read_trainer`.
    """
    trainer = read_trainer(directory)
    assert trainer is not None
    if _is_judged_otherwise(args, saved):
        trainer["counters"] |= {"best_metric": None, "best_step": None}
        trainer["committed"] = [[name, number, None] for name, number, _ in trainer["committed"]]
    return trainer


def _is_judged_otherwise(args: TrainingArguments, saved: Mapping[str, Any]) -> bool:
    """Return whether another metric chooses the best checkpoint than the saved arguments say, if any did."""
    now = args.metric_for_best_model, args.greater_is_better
    return now[0] is not None and now != (saved["metric_for_best_model"], saved["greater_is_better"])


def _steps_plateau_otherwise(args: TrainingArguments, saved: Mapping[str, Any]) -> bool:
    """Return whether a `ReduceLROnPlateau` steps with another metric than the saved arguments say."""
    now = args.metric_for_best_model or "eval_loss", bool(args.greater_is_better)
    return now != (saved["metric_for_best_model"] or "eval_loss", bool(saved["greater_is_better"]))


def load_scheduler(run: Run, directory: Path) -> None:
    """Load the scheduler's state.

    Args:
        run: The run, with its scheduler, and the scheduler's optimizer with its state.
        directory: Folder of the checkpoint.

    Raises:
        ValueError: If the scheduler rejects its state.
    """
    scheduler = run.lr_scheduler
    try:
        state: Any = read_state(directory, "lr_scheduler")
        if isinstance(scheduler, ReduceLROnPlateau) and _steps_plateau_otherwise(run.args, read_arguments(directory)):
            state |= {name: getattr(scheduler, name) for name in _OF_THE_PLATEAU}
        scheduler.load_state_dict(state)
        if isinstance(scheduler, LambdaLR):  # the saved rate follows the old schedule length
            groups = scheduler.optimizer.param_groups  # maybe those of an inner optimizer alone
            for group, peak, rate in zip(groups, scheduler.base_lrs, scheduler.lr_lambdas, strict=True):
                set_rate(group, peak * rate(scheduler.last_epoch))
    except Exception as error:
        raise ValueError(
            f"the {type(scheduler).__name__} does not take the state in {directory}: {type(error).__name__}: {error}; "
            f"resume with the same schedule, or {NEW_RUN}"
        ) from error


def report_changes(run: Run, plan: RunLength, earlier: tuple[Mapping[str, Any], Mapping[str, Any]]) -> None:
    """Log changes of the layout and the arguments since the checkpoint; warn of those without effect.

    Args:
        run: The run, at the step where it resumes.
        plan: The run's plan.
        earlier: State of the plan, and the arguments, when the checkpoint was written.
    """
    _report_layout(run, plan, earlier[0])
    now, saved_args = run.args.to_dict(), earlier[1]
    changed = {name: (saved_args[name], now[name]) for name in now if name in saved_args and name not in _OF_THE_START}
    changed = {name: (old, new) for name, (old, new) in changed.items() if old != new}
    kept = [name for name in changed if name in _IN_THE_OPTIMIZER]
    is_by_name = isinstance(run.lr_scheduler, Schedule)
    rescheduled = [name for name in changed if name in _OF_THE_SCHEDULE and is_by_name]
    judged = _OF_THE_BEST if _is_judged_otherwise(run.args, saved_args) else ()
    others = [name for name in changed if name not in (*kept, *rescheduled, *judged, *_IN_THE_LAYOUT)]
    if others:
        logger.info("resumed with other arguments: %s", _described(changed, others))
    if rescheduled:
        logger.warning(
            "resumed with another schedule (%s): from step %d on the learning rate follows it",
            _described(changed, rescheduled),
            run.state.step + 1,
        )
    if judged:
        logger.warning(
            "resumed with another metric (%s): the best checkpoint is one from step %d on",
            _described(changed, [name for name in judged if name in changed]),
            run.state.step + 1,
        )
    if kept:
        logger.warning(
            "%s changed, but the optimizer keeps the checkpoint's values; start a new run from the weights to change "
            "them", _described(changed, kept),
        )  # fmt: skip


def _described(changed: Mapping[str, tuple[Any, Any]], names: list[str]) -> str:
    return ", ".join(f"{name} {changed[name][0]!r} -> {changed[name][1]!r}" for name in names)


def _report_layout(run: Run, plan: RunLength, saved: Mapping[str, Any]) -> None:
    """Log a changed number of processes, batch size or accumulation, and the consequences."""
    now = plan.layout
    before = saved_layout(saved, now)
    window, window_before = now.global_batch_size, before.global_batch_size
    if now.steps.readers * now.steps.devices == before.steps.readers * before.steps.devices:
        _report_shares(run, now, before)
        per_device = before.batch_size // before.devices
        before = before._replace(readers=now.readers, devices=now.devices, batch_size=per_device * now.devices)
    changes = []
    reads = "reads" if now.readers == 1 else "read"
    for new, old, text in (
        (now.readers, before.readers, f"with {format_count(now.readers, 'process')} that {reads} data"),
        (now.batch_size, before.batch_size, f"with batches of {format_count(now.batch_size, 'sample')}"),
        (now.accumulation, before.accumulation, f"with {now.accumulation} of them a step"),
    ):
        if new != old:
            changes.append(f"{text} instead of {old}")
    if not changes and window == window_before:
        return
    changed = ", ".join(changes or [f"with on_resize={run.args.on_resize!r}"])
    size_before = "as before" if window == window_before else f"instead of {window_before}"
    samples = f"{format_count(window, 'sample')} a step {size_before}"
    schedule = ""
    if isinstance(run.lr_scheduler, Schedule) and run.args.max_steps < 0:
        schedule = f"; the schedule continues at step {plan.schedule_step} of {plan.schedule_length}"
        given, scaled = step_numbers(run.args), step_numbers(plan.scheduled(run.args))
        schedule += "".join(
            f", in which {name}={steps} are {scaled[name]}" for name, steps in given.items() if steps != scaled[name]
        )
    left = max(0, plan.last_step - run.state.step)
    logger.info("resumed %s, %s: %d steps are left%s", changed, samples, left, schedule)
    if window != window_before and not isinstance(run.lr_scheduler, (Schedule, ReduceLROnPlateau)):
        warn(
            f"lr_scheduler is a {type(run.lr_scheduler).__name__} of your own, which counts steps: those taken had "
            f"{window_before} samples, those to come have {window}",
        )


def _report_shares(run: Run, now: Layout, before: Layout) -> None:
    """Log how another number of processes shares a step that keeps its samples."""
    shares, shares_before = now.shares, before.shares
    if len(shares) == len(shares_before):
        return
    noun = "process" if run.strategy.collectives.reader_size == 1 else "group"
    whom = format_count(len(shares), "device" if now.devices != before.devices else noun)
    whole = (now.batches, "whole batch") if now.has_own_batches else (now.global_batch_size, "sample")
    each = f"{describe_shares(shares)} each instead of {describe_shares(shares_before)}"
    factor = max(shares) / max(shares_before)
    duration = "as long as before" if factor == 1 else f"about {factor:.2f} x as long"
    verb = "keeps" if len(shares) == 1 else "keep"
    logger.info("%s %s %s a step: %s; steps take %s", whom, verb, format_count(*whole), each, duration)
