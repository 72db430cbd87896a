"""`Trainer`: the entry point to train, evaluate, predict and save."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from trainer_kit.callback import Callback, CallbackList, checked_callbacks
from trainer_kit.callbacks import default_callbacks
from trainer_kit.checkpoint.compatibility import default_request
from trainer_kit.checkpoint.format.export import refuse_pickles, save_model_folder
from trainer_kit.checkpoint.initial_weights import InitialWeights, checked_folder, seeded
from trainer_kit.checkpoint.manager import CheckpointManager
from trainer_kit.config.arguments import TrainingArguments
from trainer_kit.config.event_schedule import evaluation_setting
from trainer_kit.config.sources import OTHER_NAMES
from trainer_kit.config.transformers_names import is_of_transformers
from trainer_kit.data.build import make_collators, make_reading
from trainer_kit.data.collate import Collator
from trainer_kit.data.peek import first_batch
from trainer_kit.loop.evaluation_loop import EvaluationLoop, chosen_dataset
from trainer_kit.loop.generation import checked_settings
from trainer_kit.loop.metrics import Metric, metrics_by_name
from trainer_kit.loop.prediction import PredictionOutput
from trainer_kit.loop.rank_sync import check_same_start
from trainer_kit.loop.results import ResultMethods
from trainer_kit.loop.setup import set_up_training
from trainer_kit.loop.training_loop import TrainingLoop
from trainer_kit.loss.loss import ComputeLoss, Loss
from trainer_kit.loss.probe import LossProbe
from trainer_kit.profiling.time_ledger import Ledger
from trainer_kit.run import Run, TrainOutput
from trainer_kit.state import IntervalMeans, Requests, TrainState
from trainer_kit.strategies.activation_checkpointing import restore_modules
from trainer_kit.strategies.base import Strategy
from trainer_kit.strategies.regroup import refuse_to_join
from trainer_kit.strategies.select import choose_strategy
from trainer_kit.utils.optimizer_state import optimizers_in
from trainer_kit.utils.overrides import (
    check_attribute,
    check_class,
    check_lightning_module,
    explains_arguments,
    missing_attribute,
)
from trainer_kit.utils.rng import generators_kept
from trainer_kit.utils.streams import guard_standard_streams
from trainer_kit.utils.user_warnings import warn

if TYPE_CHECKING:
    from trainer_kit.memory import Estimate
    from trainer_kit.planning import TrainingPlan

logger = logging.getLogger("trainer_kit")


class Trainer(ResultMethods):
    """Train, evaluate, save and resume a model.

    The life of a run:

        on_init_end
        on_train_begin              a checkpoint is loaded by now
        while steps are left and no stop is requested:
            on_epoch_begin          where an epoch begins or resumes
            fetch the global batch: all micro-batches of the step, their items counted
            on_step_begin
            for each micro-batch:
                to device -> seed -> autocast(loss) -> backward
                on_substep_end      except after the last
            on_pre_optimizer_step
            clip, optimizer
            on_optimizer_step
            scheduler, zero gradients, advance the counters
            on_step_end
            on_epoch_end            where an epoch ends
            requests, in this order:
                log:       metrics -> on_log
                evaluate:  on_evaluate_begin -> on_evaluate_end -> on_evaluate
                save:      on_save
                stop
        on_rollback                 after a return to a checkpoint from a non-finite step
        on_regroup                  where processes continue without others, or with some that have joined
        on_train_end                requests made here are still served
        on_exit
        on_exception                instead of on_exit, after an error

    Args:
        model: A `torch.nn.Module` that returns its loss; with `compute_loss`, any module. None with `model_init`.
        args: The `TrainingArguments`, or those of transformers, which are copied; None: the defaults.
        train_dataset: A map-style or iterable dataset, a DataLoader or `ReadyBatches`; None if the Trainer does not
            train.
        eval_dataset: The same, or a dict of several by name; None: no evaluation during training.
        data_collator: Makes a batch from a list of samples; None: pads with a tokenizer, else stacks.
        processing_class: Tokenizer or processor. It pads batches and is saved with the model.
        compute_loss: `compute_loss(model, batch)` returns the mean loss over the batch's items (labels that are not
            -100, else samples) or `(loss_sum, count)`; None: the loss that the model returns.
        compute_metrics: Takes an `EvalPrediction` of the whole dataset and returns a dict of metrics. With
            `batch_eval_metrics`, it takes each batch and `compute_result=`, which is true with the last one.
        preprocess_logits_for_metrics: `function(logits, labels)` returns what `compute_metrics`, `metrics` and
            `predict` get in place of the model's outputs of a batch, such as their argmax, to save memory.
        metrics: Streaming metrics with torchmetrics' `update`, `compute` and `reset`: one, a list, or a dict by name.
        callbacks: Callbacks in addition to the default ones; one of a default's class replaces that default.
        strategy: The strategy to train with; None: as `args.strategy` says.
        optimizer: The optimizer; None: as `args.optim` says.
        lr_scheduler: A scheduler of `optimizer`, or a function that makes one from an optimizer; None: as
            `args.lr_scheduler_type` says.
        model_init: Makes the model after torch is seeded with `args.seed`; given instead of `model`.
        weights: Folder of the weights to begin with: a checkpoint, or one that `save_model` or `save_pretrained` wrote.
            With `FSDP` and `model_init`, no process holds the whole model. None: those of the model.

        train_sampler: A sampler of `train_dataset`, which yields indices, or lists of indices, one for each batch;
            None: as `args.shuffle` and `args.group_by_length` say.
        eval_data_collator: The collator of evaluation and prediction; None: that of training.

    Raises:
        TypeError: If an argument is of the wrong type.
        ValueError: If arguments contradict one another.

    A subclass that overrides a method of transformers' Trainer that this Trainer never calls (`compute_loss`,
    `training_step`) raises a TypeError when it is defined, and setting such an attribute an AttributeError.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        check_class(cls, Trainer)

    if not TYPE_CHECKING:  # a visible __setattr__ would let a type checker accept every attribute

        def __setattr__(self, name: str, value: Any) -> None:
            check_attribute(self, name, value)
            super().__setattr__(name, value)

        def __getattr__(self, name: str) -> Any:
            raise missing_attribute(type(self), name, is_made="run" in vars(self))

    @explains_arguments([*OTHER_NAMES, *TrainingArguments.__annotations__])
    def __init__(
        self,
        model: torch.nn.Module | None = None,
        args: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        *,
        data_collator: Collator | None = None,
        processing_class: Any = None,
        compute_loss: ComputeLoss | None = None,
        compute_metrics: Callable[..., Mapping[str, Any]] | None = None,
        preprocess_logits_for_metrics: Callable[[Any, Any], Any] | None = None,
        metrics: Metric | Iterable[Metric] | Mapping[str, Metric] | None = None,
        callbacks: Iterable[Callback] = (),
        strategy: Strategy | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        lr_scheduler: Any = None,
        model_init: Callable[[], torch.nn.Module] | None = None,
        weights: str | Path | None = None,
        train_sampler: Iterable[Any] | None = None,
        eval_data_collator: Collator | None = None,
    ) -> None:
        check_class(type(self), Trainer)
        args = _checked_arguments(args)
        guard_standard_streams()
        args.fix_folders()
        strategy = choose_strategy(args, strategy)
        _show_log(args.log_level if strategy.is_main else "error")
        if (model is None) == (model_init is None):
            raise ValueError("give either model or model_init")
        model_init = model_init and seeded(model_init, args.seed)
        model = strategy.make_model(model_init) if model_init is not None else model
        if not isinstance(model, torch.nn.Module):
            raise TypeError(f"model is a {type(model).__name__}; give a torch.nn.Module")
        check_lightning_module(model, compute_loss is not None, optimizer is not None)
        _check_scheduler(lr_scheduler, optimizer)
        if eval_dataset is None and (setting := evaluation_setting(args)) is not None:
            warn(f"{setting} has no effect without eval_dataset")
        self.compute_loss, self.compute_metrics = compute_loss, compute_metrics
        self.preprocess_logits_for_metrics = preprocess_logits_for_metrics
        self.metrics = metrics_by_name(metrics)
        self._given_optimizer, self._given_lr_scheduler, self._set_for_next = optimizer, lr_scheduler, set[str]()
        own = checked_callbacks(callbacks)
        self.events = CallbackList([*default_callbacks(args, own), *own])
        self.run = Run(
            args=args,
            strategy=strategy,
            model=model,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            train_sampler=train_sampler,
        )
        self._initial = InitialWeights(self.run, checked_folder(weights, strategy.is_main), model_init)
        self.collate, self.eval_collate = make_collators(self.run, data_collator, eval_data_collator, compute_loss)
        self._probe: LossProbe | None = None  # None until the model is prepared
        self._loop: TrainingLoop | None = None  # of the latest call of train
        self.events.call("on_init_end", self.run)

    # Training

    def train(self, resume_from_checkpoint: bool | str | Path | None = None) -> TrainOutput:
        """Train the model until the last step; a second call is a new training of the trained weights.

        Args:
            resume_from_checkpoint: True resumes from the newest valid checkpoint in `output_dir`, and starts from the
                beginning if there is none. A path resumes from that checkpoint. None: True if a launcher restarted
                this run after a failure, unless nothing is saved yet; else `args.resume_from_checkpoint`.

        Returns:
            The number of steps, the mean loss and the metrics of the training.

        Raises:
            ValueError: If an argument is not valid; raised before training begins.
            FolderInUseError: If another training uses `output_dir`; raised before anything is changed there.
            NonFiniteError: If the loss or a gradient is not finite and `nonfinite="stop"`.
            CallbackError: If a callback raises.
            SaveError: If the last checkpoint cannot be written; with `save_failures="raise"`, if any cannot.
            SystemExit: With code 130 after Ctrl-C, once the step is finished and a checkpoint is saved.
        """
        run, loop = self.run, None
        with contextlib.ExitStack() as at_end:
            try:
                loop = self._set_up(resume_from_checkpoint, at_end)
                loop.begin()
                loop.take_steps()
                output = loop.finish()
            except BaseException as error:
                try:
                    if loop is not None:
                        loop.abort(error)
                finally:
                    self.events.call_exception(run, error)
                    run.strategy.teardown(error)
                raise
        run.strategy.teardown()
        assert loop is not None
        if loop.exit_code is not None:
            loop.leave()
        return output

    def _set_up(self, resume: bool | str | Path | None, at_end: contextlib.ExitStack) -> TrainingLoop:
        """Prepare everything up to the first step; `at_end` releases the folder and the loop."""
        run = self.run
        is_used = run.state.step and "lr_scheduler" not in self._set_for_next
        if is_used and hasattr(self._given_lr_scheduler, "state_dict"):
            raise ValueError("train() is called again, but lr_scheduler has run its course; give a function instead")
        run.state, run.means, run.requests, run.ledger = TrainState(), IntervalMeans(), Requests(), Ledger()
        checkpoints = CheckpointManager(run, self.events)
        at_end.callback(checkpoints.release_folder)
        run.strategy.defer_gradient_sync(self.args.auto_find_batch_size)
        self._prepare(to_train=True)
        at_end.callback(restore_modules, run.model)
        if resume is None and self._loop is None:
            resume = default_request(self.args, run.strategy.session.restarts)
        evaluation, reading = self._evaluation(to_train=True), make_reading(self.args, run.strategy, self.collate)
        given = self._given_optimizer, self._given_lr_scheduler, resume
        self._loop = set_up_training(evaluation, reading, checkpoints, self._initial, *given)
        self._set_for_next.clear()
        at_end.callback(self._loop.close)
        return self._loop

    def _prepare(self, to_train: bool = False) -> LossProbe:
        """Set up the strategy, and prepare the model and its loss; to train, a checkpoint may come first."""
        run = self.run
        run.strategy.setup()
        run.ledger.keep_time_by(run.strategy.device_info.clock())
        check_same_start(run)
        loss = Loss.by_arguments(run.strategy.prepare(run.model), run.model, self.compute_loss, run.args)
        if not (to_train and self._initial.is_late):
            self._initial.load()
        self._probe = LossProbe(loss, run.strategy)
        return self._probe

    def _evaluation(self, to_train: bool = False, generation: Mapping[str, Any] | None = None) -> EvaluationLoop:
        if not to_train:
            refuse_to_join()
            if self.run.strategy.is_main:  # for the files of a `compute_metrics`, or those of a script
                with contextlib.suppress(OSError):
                    Path(self.args.output_dir).mkdir(parents=True, exist_ok=True)
        probe = self._probe or self._prepare()
        if self._initial.is_late and not to_train:  # a training may have been refused before it loaded the weights
            self._initial.load()
        parts = make_reading(self.args, self.run.strategy, self.eval_collate), metrics_by_name(self.metrics)
        functions = self.compute_metrics, self.preprocess_logits_for_metrics
        return EvaluationLoop(self.run, self.events, probe, *parts, *functions, generation)

    # Evaluation

    def evaluate(self, eval_dataset: Any = None, metric_key_prefix: str = "eval", **generation: Any) -> dict[str, Any]:
        """Evaluate the model: the exact mean loss over all items, and the metrics.

        Args:
            eval_dataset: The dataset, or the name of one of those given to the Trainer; None: the one given to the
                Trainer. Datasets in a dict are evaluated one by one, and each name becomes part of the metrics' prefix.
            metric_key_prefix: Prefix of each metric's name.
            **generation: Arguments of the model's `generate`, which take precedence for this evaluation.

        Returns:
            The metrics, with runtime (seconds), samples_per_second and steps_per_second.

        Raises:
            TypeError: If an argument is unknown.
            ValueError: If there is no dataset, the dataset is empty, or the model returns no loss.
        """
        dataset = chosen_dataset(self.run.eval_dataset, eval_dataset)
        evaluation = self._evaluation(generation=checked_settings(self.model, generation, "evaluate"))
        with generators_kept(self.run.strategy.device):
            metrics = evaluation.evaluate(dataset, metric_key_prefix)
        self.events.call("on_evaluate", self.run, metrics)
        return metrics

    def predict(self, test_dataset: Any, metric_key_prefix: str = "test", **generation: Any) -> PredictionOutput:
        """Predict every sample of a dataset once, in the dataset's order.

        Args:
            test_dataset: The dataset, with or without labels.
            metric_key_prefix: Prefix of each metric's name.
            **generation: Arguments of the model's `generate`, which take precedence for this prediction.

        Returns:
            Predictions and labels as arrays on the host (lists of them with `eval_do_concat_batches=False`), and the
            metrics.

        Raises:
            TypeError: If an argument is unknown.
            ValueError: If the dataset is empty, or the model's output has no predictions.
        """
        evaluation = self._evaluation(generation=checked_settings(self.model, generation, "predict"))
        with generators_kept(self.run.strategy.device):
            output = evaluation.predict(test_dataset, metric_key_prefix)
        self.events.call("on_predict", self.run, output.metrics)
        return output

    def estimate(self, device_memory: int | str | None = None) -> Estimate:
        """Estimate the memory of a step from the model, the arguments and the first batch, without allocating it.

        Args:
            device_memory: Memory of a device in bytes, or text such as "24GiB"; None: that of the device here.

        Returns:
            The memory by component, whether it fits, the largest batch that fits, and options that need less. Print
            its `table()`, or use its `to_dict()`.

        Raises:
            ValueError: If there is no dataset, if it can be read only once, if `device_memory` is not a size, or if
                the model's computation depends on values, which an estimate does not have.
        """
        from trainer_kit.memory.advice import advise_run  # slow to import

        first = first_batch(self.run, make_reading(self.args, self.run.strategy, self.collate))
        given = self.compute_loss, self._given_optimizer, device_memory
        return advise_run(self.run, first.batch, first.samples, *given)

    def plan(
        self, resume_from_checkpoint: bool | str | Path | None = None, num_processes: int | None = None
    ) -> TrainingPlan:
        """Plan what `train` would do, without taking a step, writing a file or changing any state.

        Args:
            resume_from_checkpoint: As for `train`.
            num_processes: Number of processes to plan for; None: as this process was launched.

        Returns:
            The plan. Print it, or use its `to_dict()`.

        Raises:
            ValueError: If there is no dataset, the dataset is empty, or a requested checkpoint does not exist.
        """
        from trainer_kit.planning import PlannedTraining, make_training_plan  # slow to import

        subject = PlannedTraining(
            run=self.run,
            events=self.events,
            collate=self.collate,
            eval_collate=self.eval_collate,
            compute_loss=self.compute_loss,
            compute_metrics=self.compute_metrics,
            preprocess_logits=self.preprocess_logits_for_metrics,
            metrics=self.metrics,
            optimizer=self._given_optimizer,
            lr_scheduler=self._given_lr_scheduler,
        )
        return make_training_plan(subject, resume_from_checkpoint, num_processes)

    # Saving

    def save_model(
        self,
        output_dir: str | Path | None = None,
        max_shard_size: int | str | None = None,
        safe_serialization: bool = True,
    ) -> None:
        """Write the model for use: safetensors, and `config.json` and tokenizer files if the model has them.

        Adapters of PEFT are written as peft does, without the frozen weights below them. A model of another library
        with a `save_pretrained` is written by it, if its weights are not sharded.

        Args:
            output_dir: The folder; None: `args.output_dir`.
            max_shard_size: Bytes, or text such as "2GB"; None: `args.max_shard_size`.
            safe_serialization: Must be True, since a pickle is never written.

        Raises:
            ValueError: If `safe_serialization` is False or the size is not valid.
        """
        refuse_pickles(safe_serialization)
        run = self.run
        if self._initial.is_late:
            self._evaluation()
        elif self._probe is None:
            run.strategy.setup()
        model = run.model if self._probe is None else self._probe.loss.model
        state = run.strategy.sharding.collect_on_main(run.strategy.model_state(model))
        base = None if self._loop is None else self._loop.checkpoints.saver.base
        left_out = None if base is None else base.left_out()
        folder, size = Path(output_dir or self.args.output_dir), max_shard_size or self.args.max_shard_size
        to_host, has_whole_model = run.strategy.device_info.to_host, not run.strategy.sharding.is_active
        run.strategy.collectives.on_main(
            lambda: save_model_folder(
                folder, state, run.model, run.processing_class, size, to_host, has_whole_model, left_out
            )
        )


def _check_scheduler(scheduler: Any, optimizer: torch.optim.Optimizer | None) -> None:
    own = getattr(scheduler, "optimizer", optimizer)
    if not (callable(scheduler) or any(own is part for part in (optimizer, *optimizers_in(optimizer)))):
        raise ValueError("lr_scheduler belongs to another optimizer; give that one as optimizer=, or a function")


def _checked_arguments(args: Any) -> TrainingArguments:
    """Return the arguments; those of transformers mean here what they mean there."""
    if args is None:
        return TrainingArguments()
    if isinstance(args, TrainingArguments):
        return args
    if is_of_transformers(args):
        return TrainingArguments.from_transformers(args)
    kind = f"{type(args).__module__}.{type(args).__qualname__}"
    raise TypeError(f"args is a {kind}; give trainer_kit's TrainingArguments")


def _show_log(level: str) -> None:
    """Log to stderr, unless the program has handlers of its own."""
    logger.setLevel(level.upper())
    if not logger.hasHandlers():
        logger.addHandler(logging.StreamHandler())
