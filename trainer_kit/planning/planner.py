"""`make_training_plan`: follows a training as far as possible without a step and without side effects."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import torch

from trainer_kit.callback import Callback
from trainer_kit.checkpoint import find_checkpoints
from trainer_kit.checkpoint.compatibility import default_request
from trainer_kit.checkpoint.format.discovery import is_of_transformers
from trainer_kit.checkpoint.format.loading import check_weights
from trainer_kit.checkpoint.manager import CheckpointManager
from trainer_kit.checkpoint.user_states import check_optimizer_storable
from trainer_kit.config import environment
from trainer_kit.data.build import make_reading, make_train_loader
from trainer_kit.data.iterable_loader import StreamLoader
from trainer_kit.data.map_loader import LoaderConfig, TrainLoader
from trainer_kit.data.source import data_length, is_named
from trainer_kit.errors import ReadOnceError
from trainer_kit.memory.errors import first_line
from trainer_kit.optim import check_optimizer, make_optimizer
from trainer_kit.planning import checks, sections
from trainer_kit.planning.batches import First, batch_warnings, look_at_first
from trainer_kit.planning.cost import CostSection
from trainer_kit.planning.dry_strategy import Stage, heard
from trainer_kit.planning.event_steps import Cadence
from trainer_kit.planning.metric import MetricCheck, check_metrics
from trainer_kit.planning.model import Trial, model_facts, model_warnings, try_step, weights_dtype
from trainer_kit.planning.plan import TrainingPlan
from trainer_kit.planning.planned_training import PlannedTraining
from trainer_kit.planning.schedule import Rates
from trainer_kit.planning.storage import storage_of
from trainer_kit.state import Requests, TrainState
from trainer_kit.strategies.base import Strategy
from trainer_kit.utils.lazy_parameters import check_shapes
from trainer_kit.utils.rng import generators_kept
from trainer_kit.utils.units import join_names


def make_training_plan(
    subject: PlannedTraining, resume_from_checkpoint: bool | str | Path | None = None, num_processes: int | None = None
) -> TrainingPlan:
    """Plan a training; see `Trainer.plan`.

    Args:
        subject: Objects of the Trainer.
        resume_from_checkpoint: As for `Trainer.train`.
        num_processes: Number of processes to plan for; None for the real one.
    """
    check_shapes(subject.run.model)
    device = next((parameter.device for parameter in subject.run.model.parameters()), torch.device("cpu"))
    with heard() as messages, generators_kept(device):
        stage = Stage(subject.run.strategy, num_processes, device)
        rehearsal = _Rehearsal(subject, stage, resume_from_checkpoint)
        plan = rehearsal.plan()
    return dataclasses.replace(plan, warnings=tuple(dict.fromkeys([*plan.warnings, *messages])))


class _Rehearsal:
    """A training up to its first step, on a `Stage`."""

    def __init__(self, subject: PlannedTraining, stage: Stage, resume: bool | str | Path | None) -> None:
        self.strategy: Strategy = subject.run.strategy
        self.stage = stage
        self.run = run = dataclasses.replace(
            subject.run, strategy=stage, state=TrainState(), requests=Requests(), stateful=subject.run.stateful
        )
        self.subject = subject = dataclasses.replace(subject, run=run)
        self.problems: list[str] = []
        run.optimizer = self._optimizer()
        self.reading: LoaderConfig = make_reading(run.args, self.stage, subject.collate)
        if resume is None:
            resume = default_request(run.args, self.strategy.session.restarts)
        self.checkpoints = CheckpointManager(run, subject.events)  # without a lock: it writes nothing
        self.checkpoints.find(resume)
        self.loader: TrainLoader | StreamLoader = make_train_loader(
            run, self.reading, trains=False, saved=self.checkpoints.earlier_plan
        )
        self.checkpoints.lay_out(self.loader)
        if self.checkpoints.resumed_from is not None:
            try:
                check_weights(run.model, self.checkpoints.resumed_from)
            except ValueError as error:
                self.problems.append(str(error))

    def _optimizer(self) -> torch.optim.Optimizer:
        """Return the run's optimizer; if it cannot be created, an SGD for the rest of the plan."""
        run = self.run
        try:
            optimizer = self.subject.optimizer or make_optimizer(run.model, run.args)
            check_optimizer(optimizer, run.model)
            check_optimizer_storable(optimizer, run.args)
        except (ImportError, TypeError, ValueError) as error:
            self.problems.append(str(error))
            return torch.optim.SGD([torch.zeros(())], lr=run.args.learning_rate)
        return optimizer

    def plan(self) -> TrainingPlan:
        run, subject = self.run, self.subject
        model, args = run.model, run.args
        assert run.optimizer is not None
        first = look_at_first(run, self.loader)
        trial = self._trial(first)
        rates = self._rates()
        cadence = Cadence(run, self.loader)
        data, steps = self._data(), self._steps(cadence)
        start, hardware = self._start(), self._hardware()
        storage = self._storage(cadence, trial)
        cost = CostSection(subject, first.largest, self.strategy, self.stage.world_size)
        metrics = MetricCheck()
        if cadence.evaluations:
            reading = make_reading(run.args, self.stage, subject.eval_collate)
            metrics = check_metrics(subject, rates.scheduler if rates else None, reading)
        self.problems += filter(None, [metrics.problem])
        warnings = [
            *checks.start_warnings(start, run),
            *checks.layout_warnings(data, self.loader.layout, run),
            *batch_warnings(first, model),
            *_of_trial(trial, first, self.stage),
            *model_warnings(args, model, run.optimizer),
            *checks.tied_note(model),
            *(rates.warnings() if rates else ()),
            *checks.cadence_warnings(cadence, steps),
            *filter(None, [metrics.warning]),
            *(checks.storage_warnings(storage) if storage else ()),
            *cost.warnings(),
            *checks.hardware_warnings(hardware),
        ]
        if rates is not None and rates.error is not None:
            self.problems.append(rates.error)
        return TrainingPlan(
            data=data,
            batch=self._batch(),
            steps=steps,
            start=start,
            model=model_facts(model, trial),
            hardware=hardware,
            schedule=rates.facts() if rates else None,
            events=cadence.facts(),
            callbacks=tuple(type(each).__name__ for each in subject.events.callbacks if _may_ask(each)),
            storage=storage,
            memory=cost.memory(),
            compute=cost.compute(self._batch(), steps),
            problems=tuple(self.problems),
            warnings=tuple(warnings),
        )

    def _trial(self, first: First) -> Trial | None:
        """Try a step of a copy of the model; None if there is nothing to try."""
        if first.error is not None and not isinstance(first.error, ReadOnceError):
            self.problems.append(f"the first batches cannot be read: {first_line(first.error)}")
        if first.largest is None or self.problems:
            return None
        trial = try_step(self.run, first.largest.batch, self.subject.compute_loss)
        if trial.error is not None and trial.is_real:
            self.problems.append(f"a step of a copy of the model raised {first_line(trial.error)}")
        return trial

    def _rates(self) -> Rates | None:
        try:
            return Rates(self.run, self.subject.lr_scheduler, self.checkpoints.plan, self.checkpoints.resumed_from)
        except (TypeError, ValueError) as error:
            self.problems.append(str(error))
            return None

    def _storage(self, cadence: Cadence, trial: Trial | None) -> sections.Storage | None:
        if self.run.args.save_strategy == "no":
            return None
        idle = trial.without_gradient if trial is not None else None
        try:
            return storage_of(self.run, self.subject.events, cadence, len(self.checkpoints.saver.committed), idle or ())
        except (TypeError, ValueError) as error:
            self.problems.append(str(error))
            return None

    def _data(self) -> sections.Data:
        datasets = self.run.eval_dataset
        if datasets is None:
            datasets = {}
        elif not is_named(datasets):
            datasets = {"": datasets}
        lengths = {str(name): data_length(each) for name, each in datasets.items()}
        return sections.Data(data_length(self.run.train_dataset), self.loader.epoch_length or None, lengths)

    def _batch(self) -> sections.Batch:
        layout, stage = self.loader.layout, self.stage
        return sections.Batch(
            layout.batch_size // stage.devices,
            stage.devices,
            self.run.args.gradient_accumulation_steps,
            layout.readers,
            layout.global_batch_size,
            layout.steps.devices if layout.full else stage.devices,
            layout.steps.readers,
            tuple(layout.shares) if layout.full else (),
        )

    def _steps(self, cadence: Cadence) -> sections.StepsSection:
        loader, first, last = self.loader, self.run.state.step, self.run.total_steps
        per_epoch = loader.steps_left(self.run.state.epoch + 1, 0) if loader.epoch_length else None
        epochs = self.run.total_epochs if loader.epoch_length else None
        rest = loader.epoch_length % loader.layout.global_batch_size
        left, samples = max(0, last - first), cadence.samples
        return sections.StepsSection(first, last, left, samples, per_epoch, epochs, rest or None)

    def _start(self) -> sections.StartSection:
        folder, source = self.checkpoints.folder, self.checkpoints.resumed_from
        own = {each.name for each in self.checkpoints.saver.committed}
        others = [path for path in find_checkpoints(folder) if path.name not in own]
        names, can_resume = tuple(path.name for path in others), not all(map(is_of_transformers, others))
        return sections.StartSection(str(folder), None if source is None else str(source), names, can_resume)

    def _hardware(self) -> sections.Hardware:
        strategy, stage, args = self.strategy, self.stage, self.run.args
        assert strategy.precision is not None
        mode = strategy.precision.mode
        source = f"mixed_precision={mode!r}"
        if mode != args.mixed_precision:
            source = "the strategy was given with it"
        elif mode != "no" and mode == environment.mixed_precision():
            source += ", as the launcher set it"
        reason = strategy.reason
        if stage.world_size != strategy.world_size:
            reason += f"; planned as if {stage.world_size} processes were launched"
        return sections.Hardware(
            type(strategy).__name__,
            str(strategy.device),
            reason,
            "no autocast" if mode == "no" else f"{mode} by autocast",
            source,
            weights_dtype(self.run.model),
        )


def _may_ask(callback: Callback) -> bool:
    """Return whether a callback may request something that the arguments do not determine."""
    is_own = not type(callback).__module__.startswith("trainer_kit.callbacks.")
    return is_own or type(callback).__name__ == "EarlyStopping"


def _of_trial(trial: Trial | None, first: First, stage: Strategy) -> Iterator[str]:
    if trial is None:
        return
    if trial.error is not None and not trial.is_real:
        yield f"the model could not be run on shapes alone: {first_line(trial.error)}"
    if trial.without_gradient:
        sentence = f"the loss does not depend on {join_names(trial.without_gradient)}: they get no gradient"
        yield sentence + ("; DDP needs find_unused_parameters=True" if stage.world_size > 1 else "")
