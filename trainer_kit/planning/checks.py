"""Warnings about a run's data, steps and checkpoints before it begins."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from torch import nn

from trainer_kit.config.event_schedule import evaluation_setting
from trainer_kit.data.sampling import Layout
from trainer_kit.planning.event_steps import Cadence
from trainer_kit.planning.model import tied
from trainer_kit.planning.sections import Data, Hardware, StartSection, StepsSection, Storage
from trainer_kit.run import Run
from trainer_kit.utils.run_lock import holder_of
from trainer_kit.utils.units import format_count, join_names


def layout_warnings(data: Data, layout: Layout, run: Run) -> Iterator[str]:
    """Yield warnings about samples, batches, steps and processes that do not divide evenly."""
    if data.train is None or not data.epoch:
        return
    window, left = layout.global_batch_size, data.epoch
    dropped = data.train - left
    if dropped > 0:
        yield f"dataloader_drop_last=True leaves out {dropped:,} of {data.train:,} samples in each epoch"
    if left < window:
        yield (
            f"an epoch has {left:,} samples, fewer than the {window:,} of a step: each step takes the whole epoch, and "
            "gradient_accumulation_steps or batch size have no full effect"
        )
    elif rest := left % window:
        yield f"the last step of each epoch is short: {rest:,} of {window:,} samples"
    if layout.deals_samples:
        yield from _of_shares(layout, left, run)
    else:
        yield from _of_rows(layout, left, run)
    if run.args.max_steps > 0 and run.args.max_steps * window < left:
        seen = run.args.max_steps * window
        yield f"max_steps ends training in the first epoch: it sees {seen:,} of the {left:,} samples"


def _of_rows(layout: Layout, left: int, run: Run) -> Iterator[str]:
    """Yield warnings about the last row of batches of an epoch of `left` samples."""
    row = layout.global_micro_batch_size
    last = left % row
    idle = layout.readers - -(-last // layout.batch_size) if last and not layout.full else 0
    if idle:
        yield _of_idle(layout, idle, "in every step" if left < row else "in the last micro-batch of each epoch")
    if last % layout.batch_size == 1 and (norm := _batch_norm(run.model)) is not None:
        yield (
            f"the last batch of each epoch is a single sample, which the batch norm {norm!r} may refuse in training; "
            "set dataloader_drop_last=True, or another batch size"
        )


def _of_shares(layout: Layout, left: int, run: Run) -> Iterator[str]:
    """Yield warnings about the steps of an epoch of `left` samples that are dealt evenly to another number of them."""
    window = layout.global_batch_size
    for samples, when in ((min(window, left), "in every step"), (left % window, "in the last step of each epoch")):
        if 0 < samples < layout.readers:
            yield _of_idle(layout, layout.readers - samples, when)
        fewest = samples // (layout.rounds(samples) * layout.readers) if samples else 0
        if samples and fewest <= 1 and (norm := _batch_norm(run.model)) is not None:
            yield (
                f"{when} a process has a micro-batch of a single sample, which the batch norm {norm!r} may refuse in "
                "training; set on_resize='scale', or start as many processes as before"
            )
            return


def _of_idle(layout: Layout, idle: int, when: str) -> str:
    verbs = "has no samples, and waits" if idle == 1 else "have no samples, and wait"
    return f"{when} {idle:,} of {layout.readers:,} processes {verbs} for the others"


def _batch_norm(model: nn.Module) -> str | None:
    """Return the name of a batch norm that sees one value per sample and channel; None if there is none."""
    return next((name for name, each in model.named_modules() if isinstance(each, nn.BatchNorm1d)), None)


def cadence_warnings(cadence: Cadence, steps: StepsSection) -> Iterator[str]:
    """Yield warnings about events that never happen, or happen too late."""
    run, args = cadence.run, cadence.run.args
    if not steps.left:
        yield f"nothing is left to do: step {steps.first:,} is reached, training ends at {steps.last:,}"
        return
    if args.logging_strategy == "steps" and len(cadence.logs) == 1 and steps.last < args.logging_steps:
        yield (
            f"logging_steps={args.logging_steps:,}, but training ends after {steps.last:,} steps: the only record "
            "comes at the end"
        )
    elif args.logging_strategy == "no":
        yield "logging_strategy='no': no loss is logged"
    if run.eval_dataset is not None:
        yield from _of_evaluations(cadence, steps)
    elif (setting := evaluation_setting(args)) is not None:
        yield f"{setting} has no effect without eval_dataset"
    yield from _of_saves(cadence, steps)


def _of_evaluations(cadence: Cadence, steps: StepsSection) -> Iterator[str]:
    run, args = cadence.run, cadence.run.args
    if args.eval_strategy == "no" and not cadence.evaluations:
        yield "eval_dataset is given, but eval_strategy='no': training never evaluates it"
    elif args.eval_strategy == "steps" and steps.last < (interval := args.eval_steps or args.logging_steps):
        yield (
            f"eval_steps={interval:,}, but training ends after {steps.last:,} steps: the only evaluation comes "
            "at the end"
        )
    elif cadence.evaluations[-1] != steps.last:
        yield (
            f"the last evaluation is at step {cadence.evaluations[-1]:,}: what the last "
            f"{steps.last - cadence.evaluations[-1]:,} steps give is not evaluated"
        )
    if run.eval_dataset is run.train_dataset:
        yield "eval_dataset is train_dataset: an evaluation does not show how the model does on new samples"


def _of_saves(cadence: Cadence, steps: StepsSection) -> Iterator[str]:
    args = cadence.run.args
    if args.save_strategy == "no":
        yield "save_strategy='no': no checkpoint is saved, an interrupted run is lost"
    elif args.save_strategy == "steps" and args.save_steps > steps.last and args.save_minutes is None:
        yield (
            f"save_steps={args.save_steps:,}, but training ends after {steps.last:,} steps: the only checkpoint comes "
            "at the end"
        )
    judged = [step for step in cadence.evaluations if step]  # the one before the first step is not
    if cadence.schedule.saves_best and not judged:
        named = "save_strategy='best'" if args.save_strategy == "best" else "load_best_model_at_end=True"
        yield f"{named}, but no evaluation decides which checkpoint is the best"
    elif args.save_strategy == "best" and judged[0] == steps.last:
        yield "save_strategy='best' saves nothing before the only evaluation, at the end: an interrupted run is lost"


def storage_warnings(storage: Storage) -> Iterator[str]:
    """Yield a warning if the disk has no room for the checkpoints."""
    more = max(1, (storage.at_once or 1) - storage.there)
    if storage.size * more > storage.free:
        checkpoints = format_count(more, "checkpoint")
        yield f"the disk has no room for {checkpoints}: set a smaller save_total_limit, or another output_dir"


def start_warnings(start: StartSection, run: Run) -> Iterator[str]:
    """Yield warnings about a running training in the folder, and about checkpoints that would be moved."""
    if (holder := holder_of(Path(start.folder))) is not None:
        yield f"{start.folder} is in use: {holder} trains there, and train() would be refused until that ends"
    if not start.others:
        return
    which = join_names(start.others)
    if start.checkpoint is None:
        remedy = " (set resume_from_checkpoint=True to resume)" if start.can_resume else ""
        yield (
            f"{run.args.output_dir} holds {which}, and this run does not resume from there: it would move them to "
            f"earlier-N/{remedy}"
        )
    else:
        yield f"{which} in {run.args.output_dir} would be moved to earlier-N/: this run resumes from {start.checkpoint}"


def hardware_warnings(hardware: Hardware) -> Iterator[str]:
    """Yield a warning about a precision that is slow on the device."""
    if hardware.precision.startswith("fp16") and hardware.device == "cpu":
        yield "mixed_precision='fp16' on the CPU is slow and coarse; 'bf16' is what CPUs compute in"


def tied_note(model: nn.Module) -> Iterator[str]:
    """Yield the groups of tied parameters."""
    for names in tied(model):
        yield f"tied weights: {' = '.join(names)} (trained and saved once)"
