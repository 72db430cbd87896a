"""`Trainer`: the loop."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from trainer_kit.callback import Callback, CallbackList, checked_callbacks
from trainer_kit.callbacks import default_callbacks
from trainer_kit.checkpoint.format.export import save_model_folder
from trainer_kit.checkpoint.manager import CheckpointManager, check_stateful, check_storable
from trainer_kit.config.arguments import TrainingArguments
from trainer_kit.data.build import (
    make_evaluation_batches,
    make_reading,
    make_train_loader,
)
from trainer_kit.data.collate import Collator, default_collator
from trainer_kit.data.map_loader import GlobalBatch
from trainer_kit.data.peek import first_batch
from trainer_kit.debugging.crash_dump import CrashDump
from trainer_kit.errors import DoesNotFitError, EvaluationInterrupted, NonFiniteError
from trainer_kit.loop.batch_size_finder import BatchSizeFinder, evaluation_batch_size, halve_evaluation_batch
from trainer_kit.loop.evaluation import EvalPrediction, Evaluator, PredictionOutput
from trainer_kit.loop.metrics import Metric, metrics_by_name
from trainer_kit.loop.rank_sync import RankSync, check_same_start
from trainer_kit.loop.step_metrics import StepMetrics, StepSpan
from trainer_kit.loop.train_step import Steps
from trainer_kit.loss.loss import ComputeLoss, Loss, takes_column
from trainer_kit.loss.probe import LossProbe
from trainer_kit.optim import check_optimizer, make_optimizer, make_scheduler, own_scheduler
from trainer_kit.profiling.time_ledger import Ledger
from trainer_kit.run import Run, TrainOutput
from trainer_kit.state import Requests, TrainState
from trainer_kit.strategies.base import Strategy
from trainer_kit.strategies.select import choose_strategy
from trainer_kit.utils.overrides import check_attribute, check_class, check_lightning_module
from trainer_kit.utils.rng import generators_kept
from trainer_kit.utils.streams import guard_standard_streams, warn_of_failed_streams
from trainer_kit.utils.user_warnings import warn

if TYPE_CHECKING:
    from trainer_kit.memory import Estimate
    from trainer_kit.planning import TrainingPlan

logger = logging.getLogger("trainer_kit")

_UNREAD = 1000
"""Steps after which losses are read from the device though no record is due, so that they do not pile up."""


class Trainer:
    """Trains, evaluates, saves and resumes a model.

    The life of a run::

        on_init_end
        on_train_begin                                        a checkpoint is loaded by now
        while steps are left and nobody asked to stop:
            on_epoch_begin                                    where an epoch begins or goes on
            fetch the window: all micro-batches of the step, their items counted
            on_step_begin
            for each micro-batch:
                to device -> seed -> autocast(loss) -> backward
                on_substep_end                                but for the last
            on_pre_optimizer_step
            clip, optimizer
            on_optimizer_step
            scheduler, zero gradients, count
            on_step_end
            on_epoch_end                                      where an epoch ends
            what was asked for, in this order:
                log:       metrics -> on_log
                evaluate:  on_evaluate_begin -> on_evaluate
                save:      on_save
                stop
        on_rollback                                           after a step that was not finite, where it goes back
        on_train_end                                          what is asked for here is done too
        on_exit
        on_exception                                          instead, where something raised

    Args:
        model: Any `torch.nn.Module` that returns its loss, or any with `compute_loss`.
        args: See `TrainingArguments`.
        train_dataset: Map-style or iterable.
        eval_dataset: The same, or a dict of several by name.
        data_collator: Makes a batch from a list of samples; default: pads with a tokenizer, else stacks.
        processing_class: Tokenizer or processor; pads, and is saved with the model.
        compute_loss: `compute_loss(model, batch)` returns the mean loss over the batch's items (labels that are not
            -100, else samples) or `(loss_sum, count)`.
        compute_metrics: Gets an `EvalPrediction` with everything predicted, returns a dict.
        metrics: Streaming metrics (update, compute, reset as torchmetrics has them): one, a list, or a dict by name.
        callbacks: Listeners beside the default ones; one of a default's class takes its place.
        strategy: Where to train; default: as `args.strategy` says.
        optimizer: Default: as `args.optim` says.
        lr_scheduler: A scheduler of `optimizer`, or a function that makes one from an optimizer.
        model_init: Makes the model, seeded with `args.seed`, where none is given.

    Raises:
        TypeError: If something is of the wrong kind.
        ValueError: If arguments contradict one another.

    A subclass that defines a method of transformers' Trainer which is not called here (`compute_loss`, `training_step`)
    raises a TypeError where the class is made, and a foreign attribute an AttributeError where it is set.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        check_class(cls, Trainer)

    if not TYPE_CHECKING:  # under which every attribute could be set

        def __setattr__(self, name: str, value: Any) -> None:
            check_attribute(type(self), name)
            super().__setattr__(name, value)

    def __init__(
        self,
        model: torch.nn.Module | None = None,
        args: TrainingArguments | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        *,
        data_collator: Collator | None = None,
        processing_class: Any = None,
        compute_loss: ComputeLoss | None = None,
        compute_metrics: Callable[[EvalPrediction], Mapping[str, Any]] | None = None,
        metrics: Metric | Iterable[Metric] | Mapping[str, Metric] | None = None,
        callbacks: Iterable[Callback] = (),
        strategy: Strategy | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        lr_scheduler: Any = None,
        model_init: Callable[[], torch.nn.Module] | None = None,
    ) -> None:
        check_class(type(self), Trainer)
        args = args if args is not None else TrainingArguments()
        if not isinstance(args, TrainingArguments):
            raise TypeError(f"args is a {_full_name(args)}; give trainer_kit's TrainingArguments")
        guard_standard_streams()
        args.fix_folders()
        strategy = choose_strategy(args, strategy)
        _show_log(args.log_level if strategy.is_main else "error")
        if (model is None) == (model_init is None):
            raise ValueError("give either model or model_init")
        if model_init is not None:
            torch.manual_seed(args.seed)
            model = model_init()
        if not isinstance(model, torch.nn.Module):
            raise TypeError(f"model is a {type(model).__name__}; give a torch.nn.Module")
        check_lightning_module(model, compute_loss is not None, optimizer is not None)
        if not callable(lr_scheduler) and getattr(lr_scheduler, "optimizer", optimizer) is not optimizer:
            raise ValueError("lr_scheduler belongs to another optimizer; give that one as optimizer=, or a function")
        if args.eval_strategy != "no" and eval_dataset is None:
            warn(f"eval_strategy={args.eval_strategy!r} has no effect without eval_dataset")
        takes_mask = compute_loss is not None or takes_column(model, "attention_mask")
        self.collate = data_collator or default_collator(
            processing_class, args.pad_to_multiple_of, takes_mask, args.pad_to_lengths, strategy.static_shapes
        )
        self.compute_loss = compute_loss
        self.compute_metrics = compute_metrics
        self.metrics = metrics_by_name(metrics)
        self.optimizer = optimizer
        self.lr_scheduler = lr_scheduler
        own = checked_callbacks(callbacks)
        self.events = CallbackList([*default_callbacks(args, own), *own])
        self.run = Run(
            args=args,
            strategy=strategy,
            model=model,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
        )
        self._agreement = RankSync(self.run)
        self._began = False
        self._saved_step: int | None = None  # of the newest checkpoint of this start
        self._postmortem: CrashDump | None = None  # while it trains
        self._loss: Loss = None  # type: ignore[assignment]  # made by _prepare()
        self._steps: Steps = None  # type: ignore[assignment]  # made by _begin()
        self._checkpoints: CheckpointManager = None  # type: ignore[assignment]  # made by _begin()
        self.events.call("on_init_end", self.run)

    @property
    def args(self) -> TrainingArguments:
        """Those of the run."""
        return self.run.args

    # Training

    def train(self, resume_from_checkpoint: bool | str | Path | None = None) -> TrainOutput:
        """Trains to the end.

        Args:
            resume_from_checkpoint: True goes on from the newest valid checkpoint in `output_dir`, and starts from the
                beginning where there is none yet; a path goes on from that checkpoint. None: True where a launcher
                started this run anew after a failure, else False.

        Returns:
            Steps, mean loss and figures.

        Raises:
            ValueError: If something that was given makes no sense, before training begins.
            FolderInUseError: If another training is at work in `output_dir`, before anything is changed there.
            NonFiniteError: If the loss or a gradient is not finite and `nonfinite="stop"`.
            CallbackError: If a callback raised.
            SaveError: If the last checkpoint could not be written, or any with `save_failures="raise"`.
            SystemExit: With code 130 after Ctrl-C, once the step is finished and a checkpoint saved.
        """
        run = self.run
        try:
            self._begin(resume_from_checkpoint)
            self.events.call("on_train_begin", run)
            first = (run.state.step, run.state.samples)
            begin = time.perf_counter()
            run.ledger.enter("loop")
            while True:  # goes back to a checkpoint where a step was not finite and `nonfinite="rollback"`
                try:
                    self._train_on()
                    self._read_figures()
                    break
                except NonFiniteError as error:
                    self._roll_back(error)
            seconds = time.perf_counter() - begin
            self._finish_save()  # the record at the end tells of it
            output = self._summary(seconds, *first)
            if self._agreement.pending.exit_code is None:
                self.events.call("on_log", run, output.metrics)
            self.events.call("on_train_end", run)
            self._agreement.sync()
            self._serve()
            self._finish_save()
            if self.args.load_best_model_at_end and self._agreement.pending.exit_code is None:
                self._checkpoints.load_best()
            self._agreement.sync()  # a signal that came meanwhile
            self._checkpoints.saver.close()
            if self._checkpoints.saver.failed and self._agreement.pending.exit_code is None:
                raise self._checkpoints.saver.error()
            warn_of_failed_streams()
            self.events.call("on_exit", run)
            self._agreement.sync()
            exit_code = self._agreement.pending.exit_code
        except BaseException as error:
            try:
                self._keep_what_there_is(error)
            finally:
                self.events.call_exception(run, error)
                run.strategy.teardown(error)
            raise
        finally:
            if self._steps is not None:
                self._steps.close()
            if self._checkpoints is not None:
                self._checkpoints.release_folder()
            self._postmortem, run.requests.exit_code = None, None
        run.strategy.teardown()
        if exit_code is not None:
            newest = self._checkpoints.newest
            kept = f"; the newest checkpoint is {newest}" if newest else ""
            if self._checkpoints.saver.failed:
                kept = f", but {self._checkpoints.saver.error()}"
            logger.warning(
                "left at step %d of %d%s; train(resume_from_checkpoint=True) goes on",
                run.state.step,
                run.total_steps,
                kept,
            )
            raise SystemExit(exit_code)
        return output

    def _keep_what_there_is(self, error: BaseException) -> None:
        if self._checkpoints is not None:
            self._checkpoints.saver.drain()
            self._checkpoints.saver.close()
        if self._postmortem is not None:
            self._postmortem.write(error, self._checkpoints.newest, self._steps.micro, self._steps.fetching)

    def _begin(self, resume: bool | str | Path | None) -> None:
        """Everything between the call of `train` and the first step."""
        run, args = self.run, self.args
        if run.state.step and hasattr(self.lr_scheduler, "state_dict"):
            raise ValueError("train() is called again, but lr_scheduler has run its course; give a function instead")
        run.state, run.requests, run.ledger = TrainState(), Requests(), Ledger()
        self._checkpoints, self._figures, self._stopping = CheckpointManager(run, self.events), StepMetrics(run), False
        self._agreement, self._saved_step, self._space_checked = RankSync(run), None, False
        self._record: dict[str, Any] = {}  # the newest one
        self._records_metric: bool | None = None  # whether records hold metric_for_best_model; None before one is asked
        run.strategy.defer_gradient_sync(args.auto_find_batch_size)
        self._prepare()
        if args.gradient_checkpointing:
            run.strategy.enable_activation_checkpointing(run.model)
        if args.torch_compile:
            run.strategy.compile(run.model)
        run.model.train()
        run.model.zero_grad()  # of a training that broke off, or of the user's own
        run.optimizer = run.strategy.prepare_optimizer(self.optimizer or make_optimizer(run.model, args))
        check_optimizer(run.optimizer, run.model)
        self._loader = make_train_loader(run, self._reading)
        if resume is None and not self._began:
            resume = run.strategy.session.restarts > 0
        self._began = True
        self._checkpoints.find(run.strategy.collectives.broadcast(resume))
        fitting = None
        if args.auto_find_batch_size:
            fitting = BatchSizeFinder(run, self._loader)
            fitting.begin(self.compute_loss, self.optimizer)
        self._checkpoints.lay_out(self._loader)
        run.lr_scheduler = self._make_scheduler(run.optimizer)
        check_stateful(run)
        check_storable(run)
        self._checkpoints.restore()
        self._loss.shifts = self._checkpoints.shifts_labels
        if run.total_steps <= run.state.step:
            logger.warning(
                "nothing is left to do: step %d is reached, training ends at %d", run.state.step, run.total_steps
            )
        self._steps = Steps(
            run, self.events, self._inspection, self._loader, self._checkpoints, self._agreement, fitting
        )
        self._postmortem = CrashDump(run, self._loss, self._loader)

    def _prepare(self) -> None:
        """Brings strategy, model and loss together."""
        run = self.run
        run.strategy.setup()
        run.ledger.keep_time_by(run.strategy.device_info.clock())
        check_same_start(run)
        self._loss = Loss(run.strategy.prepare(run.model), run.model, self.compute_loss)
        self._inspection = LossProbe(self._loss, run.strategy)
        self._reading = make_reading(self.args, run.strategy, self.collate)

    def _make_scheduler(self, optimizer: torch.optim.Optimizer) -> Any:
        run = self.run
        if self.lr_scheduler is None:
            plan = self._checkpoints.plan
            return make_scheduler(optimizer, plan.scheduled(self.args), plan.schedule_length, plan.schedule_step)
        scheduler = own_scheduler(self.lr_scheduler, optimizer)
        if isinstance(scheduler, ReduceLROnPlateau) and (self.args.eval_strategy == "no" or run.eval_dataset is None):
            raise ValueError("ReduceLROnPlateau steps at evaluations; set eval_strategy and give eval_dataset")
        return scheduler

    def _roll_back(self, error: NonFiniteError) -> None:
        """Goes back to the newest checkpoint; the samples of the bad step are passed over when it comes there again."""
        run = self.run
        self._finish_save()
        if run.args.nonfinite != "rollback" or run.state.rollbacks >= run.args.max_rollbacks or error.span is None:
            raise error
        bad, done, passed_over = error.span, run.state.rollbacks, run.state.passed_over
        found = run.state.micro_batch, run.state.eval_batch
        directory = self._checkpoints.rollback()
        if directory is None:
            raise error
        run.state.rollbacks, (run.state.micro_batch, run.state.eval_batch) = done + 1, found
        run.state.passed_over = [*passed_over, bad[1:]]
        self._checkpoints.lay_out(self._loader)
        if self.lr_scheduler is None:  # fewer steps have another schedule
            assert run.optimizer is not None
            run.lr_scheduler = self._make_scheduler(run.optimizer)
        self._figures.forget()
        due = self._agreement.pending
        due.log = due.evaluate = due.save = False
        self._steps.open_data()
        logger.warning(
            "went back to %s (%d of %d times): %s", directory, run.state.rollbacks, run.args.max_rollbacks, error
        )
        self.events.call("on_rollback", run, directory)
        epoch, position = run.state.epoch, run.state.position
        if position and self._loader.epoch_length and not self._loader.steps_left(epoch, position):
            self._steps.leave_epoch()
            self.events.call("on_epoch_end", run)
            self._ask_by_epoch()

    def _train_on(self) -> None:
        run, args, steps, state, emit = self.run, self.args, self._steps, self.run.state, self.events.call
        # An evaluation that was broken off before the checkpoint, or a callback that has seen enough by then.
        if self._agreement.sync():
            self._serve()
        epoch_open = False
        while state.step < run.total_steps and not self._stopping:
            if not epoch_open:
                emit("on_epoch_begin", run)
                epoch_open = True
                steps.look_ahead()
            window = steps.take()
            self._note(window)
            emit("on_step_end", run)
            if not self._space_checked and args.save_strategy != "no":  # the first step has made the optimizer's state
                self._space_checked = True
                self._checkpoints.check_space(run.strategy.model_state(self._loss.model))
            self._ask_by_step()
            if window.closes_epoch:
                emit("on_epoch_end", run)
                epoch_open = False
            ends = state.step == run.total_steps  # in the middle of an epoch, perhaps, and of an interval of records
            if window.closes_epoch or ends:
                self._ask_by_epoch()
            if ends and args.logging_strategy != "no":
                run.requests.log = True
            # An epoch's first window is fetched after on_epoch_begin, which may change the dataset.
            if steps.look_ahead() if epoch_open and not ends else self._agreement.sync():
                self._serve()
            elif len(self._figures) >= _UNREAD:
                self._read_figures()

    def _note(self, window: GlobalBatch) -> None:
        """Keeps the figures of the step that is over, for a record."""
        # A step in which no label counts has no loss, not one of zero (labels on a device are not waited for).
        items = self._loss.items(window)
        has_items = not isinstance(items, int) or items > 0
        self._figures.append(StepSpan(self.run.state.step, window.epoch, window.start, window.stop), has_items)

    def _ask_by_step(self) -> None:
        args, requests, step = self.args, self.run.requests, self.run.state.step
        requests.log = requests.log or args.logs_after(step)
        requests.evaluate = requests.evaluate or args.evaluates_after(step)

    def _ask_by_epoch(self) -> None:
        requests = self.run.requests
        requests.log = requests.log or self.args.logging_strategy == "epoch"
        requests.evaluate = requests.evaluate or self.args.eval_strategy == "epoch"

    def _serve(self) -> None:
        """Does what was asked for, in a fixed order: a checkpoint knows its evaluation."""
        self._checkpoints.lock.check()
        run, due, reach = self.run, self._agreement.pending, self._agreement.sync
        if due.written:
            self._finish_save()
            if not (due.log or due.evaluate or due.save or due.stop):
                return  # without waiting for the device
        self._read_figures()
        if due.log:
            due.log = False
            self._log()
            reach()  # what its listeners ask for
        if due.evaluate and run.eval_dataset is None:
            due.evaluate = False
        if due.evaluate and due.exit_code is None:
            try:
                self._evaluate_step()
                due.evaluate = False
            except EvaluationInterrupted:
                logger.info("the evaluation at step %d was broken off; a resume begins with it", run.state.step)
            reach()
        if due.save:
            due.save = False
            if due.exit_code is None or self._saved_step != run.state.step:  # leaving asks for one that may be there
                self._save()
            reach()
        if due.stop:
            due.stop, self._stopping = False, True

    def _read_figures(self) -> None:
        self._figures.read(self._newest_checkpoint)

    def _newest_checkpoint(self) -> Path | None:
        self._finish_save()
        return self._checkpoints.newest

    def _log(self) -> None:
        with self.run.ledger.during("logging"):
            warn_of_failed_streams()
            self._record = self._figures.record() | self.events.metrics(self.run)
            self.events.call("on_log", self.run, self._record)

    def _summary(self, seconds: float, first_step: int, first_sample: int) -> TrainOutput:
        state = self.run.state
        self._read_figures()
        mean = state.loss_sum / state.loss_steps if state.loss_steps else math.nan
        metrics = {
            "step": state.step,
            "epoch": state.epochs,
            "train_loss": mean,
            "train_runtime": seconds,
            "train_samples_per_second": (state.samples - first_sample) / seconds,
            "train_steps_per_second": (state.step - first_step) / seconds,
        }
        return TrainOutput(
            state.step, mean, metrics | self.run.strategy.device_info.memory() | self.events.summary(self.run)
        )

    # Evaluation

    def evaluate(self, eval_dataset: Any = None, metric_key_prefix: str = "eval") -> dict[str, Any]:
        """Evaluates the model: the true mean loss over all items, and the metrics.

        Args:
            eval_dataset: Instead of the Trainer's own; a dict of datasets is evaluated one by one, each name in the
                metrics' prefix.
            metric_key_prefix: Before each metric's name.

        Returns:
            The metrics, with runtime (seconds), samples_per_second and steps_per_second.

        Raises:
            ValueError: If there is no dataset, or an empty one, or the model gives no loss.
        """
        dataset = self.run.eval_dataset if eval_dataset is None else eval_dataset
        if dataset is None:
            raise ValueError("evaluate() needs eval_dataset")
        if self._loss is None:
            self._prepare()
        with generators_kept(self.run.strategy.device):
            metrics = self._evaluated(dataset, metric_key_prefix)
        self.events.call("on_evaluate", self.run, metrics)
        return metrics

    def predict(self, test_dataset: Any, metric_key_prefix: str = "test") -> PredictionOutput:
        """Predicts every sample of a dataset once, in its order.

        Args:
            test_dataset: With or without labels.
            metric_key_prefix: Before each metric's name.

        Returns:
            Predictions and labels as arrays on the host, and the metrics.

        Raises:
            ValueError: If the dataset is empty or the model's output holds no predictions.
        """
        if self._loss is None:
            self._prepare()
        with generators_kept(self.run.strategy.device):
            output = self._run_evaluator(test_dataset, metric_key_prefix, keep=True)
        self.events.call("on_predict", self.run, output.metrics)
        return output

    def estimate(self, device_memory: int | str | None = None) -> Estimate:
        """The memory of a step with this model, these arguments and the first batch, found without memory for it.

        Args:
            device_memory: Bytes, or a string such as "24GiB", that a device has; None: as much as the one here has.

        Returns:
            The memory by component, whether it fits, the largest batch that does and what would need less: print its
            `table()`, or take its `to_dict()`.

        Raises:
            ValueError: If there is no dataset, or one that can be read only once, if `device_memory` is no size, or if
                the model computes what hangs on values that are not known.
        """
        from trainer_kit.memory.advice import advise_run  # takes its time

        reading = make_reading(self.args, self.run.strategy, self.collate)
        first = first_batch(self.run, reading)
        return advise_run(self.run, first.batch, first.samples, self.compute_loss, self.optimizer, device_memory)

    def plan(
        self, resume_from_checkpoint: bool | str | Path | None = None, num_processes: int | None = None
    ) -> TrainingPlan:
        """What `train` would do, found without a step, a file or a change to anything.

        Args:
            resume_from_checkpoint: As for `train`.
            num_processes: As if so many processes had been launched; None: as this one was.

        Returns:
            The plan: print it, or take its `to_dict()`.

        Raises:
            ValueError: If there is no dataset or an empty one, or no checkpoint where one is asked for.
        """
        from trainer_kit.planning import PlannedTraining, make_training_plan  # takes its time

        subject = PlannedTraining(
            run=self.run,
            events=self.events,
            collate=self.collate,
            compute_loss=self.compute_loss,
            compute_metrics=self.compute_metrics,
            metrics=self.metrics,
            optimizer=self.optimizer,
            lr_scheduler=self.lr_scheduler,
        )
        return make_training_plan(subject, resume_from_checkpoint, num_processes)

    def _evaluate_step(self) -> None:
        """The evaluation of a training step, whose result the checkpoint and the schedule get to know."""
        run = self.run
        metrics = self._evaluated(run.eval_dataset, "eval")
        name = self.args.metric_for_best_model or "eval_loss"
        if name not in metrics and self.args.metric_for_best_model is not None:
            self._add_callbacks_number(metrics, name)
        self.events.call_evaluation(run, metrics, lambda: self._judge(metrics, name))

    def _judge(self, metrics: Mapping[str, Any], name: str) -> None:
        """Lets what an evaluation gave decide on the best checkpoint and on the learning rate."""
        run, by_metric = self.run, isinstance(self.run.lr_scheduler, ReduceLROnPlateau)
        if self.args.metric_for_best_model is None and not by_metric:
            return
        value = run.strategy.collectives.broadcast(
            metrics.get(name)
        )  # a callback may have added it on the main process alone
        if not isinstance(value, (int, float)):
            raise ValueError(
                f"metric_for_best_model={name!r} is not among the numbers that evaluation and callbacks give: "
                f"{', '.join(metrics)}"
            )
        if self.args.metric_for_best_model is not None:
            self._checkpoints.record_metric(float(value))
        if by_metric:
            run.lr_scheduler.step(value)

    def _add_callbacks_number(self, metrics: dict[str, Any], name: str) -> None:
        """Takes `metric_for_best_model` from the numbers that callbacks give for records, if one of them gives it."""
        if self._record.get("step") != self.run.state.step and self._records_metric is not False:
            self._log()
        given = [each for each in (name, name.removeprefix("eval_")) if each in self._record]
        self._records_metric = bool(given)
        if given:
            metrics[name] = self._record[given[0]]

    def _evaluated(self, dataset: Any, prefix: str) -> dict[str, Any]:
        if not isinstance(dataset, Mapping):
            return self._run_evaluator(dataset, prefix).metrics
        metrics: dict[str, Any] = {}
        for name, each in dataset.items():
            metrics |= self._run_evaluator(each, f"{prefix}_{name}").metrics
        return metrics

    def _run_evaluator(self, dataset: Any, prefix: str, keep: bool = False) -> PredictionOutput:
        run = self.run
        evaluator = Evaluator(run, self._inspection, self.metrics, self.compute_metrics)
        with run.ledger.during("evaluation"):
            try:
                self.events.call("on_evaluate_begin", run)
                while True:
                    batches = make_evaluation_batches(run, dataset, self._reading, evaluation_batch_size(run))
                    try:
                        return evaluator(batches, prefix, keep)
                    except DoesNotFitError as error:
                        halve_evaluation_batch(run, error)
            finally:
                self.events.call("on_evaluate_end", run)

    # Saving

    def save_model(
        self,
        output_dir: str | Path | None = None,
        max_shard_size: int | str | None = None,
        safe_serialization: bool = True,
    ) -> None:
        """Writes the model for use: safetensors, `config.json` and tokenizer files where there are any.

        Args:
            output_dir: Default: `args.output_dir`.
            max_shard_size: Bytes, or text such as "2GB"; default: `args.max_shard_size`.
            safe_serialization: Must be True: nothing is written as a pickle.

        Raises:
            ValueError: If `safe_serialization` is False or the size makes no sense.
        """
        if not safe_serialization:
            raise ValueError("safe_serialization=False would write a pickle; only safetensors are written")
        run = self.run
        if self._loss is None:
            run.strategy.setup()
        state = run.strategy.model_state(run.model if self._loss is None else self._loss.model)
        folder, size = Path(output_dir or self.args.output_dir), max_shard_size or self.args.max_shard_size
        to_host = run.strategy.device_info.to_host
        run.strategy.collectives.on_main(
            lambda: save_model_folder(folder, state, run.model, run.processing_class, size, to_host)
        )

    def _save(self) -> None:
        self._finish_save()  # one at a time
        with self.run.ledger.during("saving"):
            state = self.run.strategy.model_state(self._loss.model)
            self._checkpoints.begin_save(state, evaluation_is_due=self._agreement.pending.evaluate)
        self._saved_step = self.run.state.step
        if not self.args.async_save:
            self._finish_save()

    def _finish_save(self) -> None:
        """Waits for the checkpoint that is being written, if there is one."""
        self._agreement.pending.written = False
        if not self._checkpoints.saver.is_busy:
            return
        with self.run.ledger.during("saving"):
            directory = self._checkpoints.saver.finish()
            if directory is not None:
                self.events.call("on_save", self.run, directory)
            else:
                self._saved_step = None


def _full_name(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _show_log(level: str) -> None:
    """Events of a run go to stderr, unless the program has handlers of its own."""
    logger.setLevel(level.upper())
    if not logger.hasHandlers():
        logger.addHandler(logging.StreamHandler())
