"""`Trainer`: the loop."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from trainer_kit.callback import Callback, CallbackList, checked_callbacks
from trainer_kit.callbacks import default_callbacks
from trainer_kit.checkpoint.format.export import save_model_folder
from trainer_kit.checkpoint.manager import CheckpointManager
from trainer_kit.config.arguments import TrainingArguments
from trainer_kit.data.build import make_reading
from trainer_kit.data.collate import Collator, default_collator
from trainer_kit.data.peek import first_batch
from trainer_kit.loop.evaluation import EvalPrediction, PredictionOutput
from trainer_kit.loop.evaluation_loop import EvaluationLoop
from trainer_kit.loop.metrics import Metric, metrics_by_name
from trainer_kit.loop.rank_sync import check_same_start
from trainer_kit.loop.setup import set_up_training
from trainer_kit.loop.training_loop import TrainingLoop
from trainer_kit.loss.loss import ComputeLoss, Loss, takes_column
from trainer_kit.loss.probe import LossProbe
from trainer_kit.profiling.time_ledger import Ledger
from trainer_kit.run import Run, TrainOutput
from trainer_kit.state import Requests, TrainState
from trainer_kit.strategies.base import Strategy
from trainer_kit.strategies.select import choose_strategy
from trainer_kit.utils.overrides import check_attribute, check_class, check_lightning_module
from trainer_kit.utils.rng import generators_kept
from trainer_kit.utils.streams import guard_standard_streams
from trainer_kit.utils.user_warnings import warn

if TYPE_CHECKING:
    from trainer_kit.memory import Estimate
    from trainer_kit.planning import TrainingPlan

logger = logging.getLogger("trainer_kit")


class Trainer:
    """Trains, evaluates, saves and resumes a model.

    The life of a run::

        on_init_end
        on_train_begin                                        a checkpoint is loaded by now
        while steps are left and nobody asked to stop:
            on_epoch_begin                                    where an epoch begins or goes on
            fetch the global batch: all micro-batches of the step, their items counted
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
                evaluate:  on_evaluate_begin -> on_evaluate_end -> on_evaluate
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
        self._probe: LossProbe | None = None  # of the prepared model; None before it is
        self._loop: TrainingLoop | None = None  # of the newest training
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
            loop.warn_of_exit()
            raise SystemExit(loop.exit_code)
        return output

    def _set_up(self, resume: bool | str | Path | None, at_end: contextlib.ExitStack) -> TrainingLoop:
        """Everything between the call of `train` and the first step; `at_end` releases what it takes."""
        run = self.run
        if run.state.step and hasattr(self.lr_scheduler, "state_dict"):
            raise ValueError("train() is called again, but lr_scheduler has run its course; give a function instead")
        run.state, run.requests, run.ledger = TrainState(), Requests(), Ledger()
        checkpoints = CheckpointManager(run, self.events)
        at_end.callback(checkpoints.release_folder)
        run.strategy.defer_gradient_sync(self.args.auto_find_batch_size)
        self._prepare()
        if resume is None and self._loop is None:
            resume = run.strategy.session.restarts > 0
        self._loop = set_up_training(self._evaluation(), checkpoints, self.optimizer, self.lr_scheduler, resume)
        at_end.callback(self._loop.close)
        return self._loop

    def _prepare(self) -> LossProbe:
        """Brings strategy, model and loss together."""
        run = self.run
        run.strategy.setup()
        run.ledger.keep_time_by(run.strategy.device_info.clock())
        check_same_start(run)
        loss = Loss(run.strategy.prepare(run.model), run.model, self.compute_loss)
        self._probe = LossProbe(loss, run.strategy)
        return self._probe

    def _evaluation(self) -> EvaluationLoop:
        probe = self._probe or self._prepare()
        loader_config = make_reading(self.args, self.run.strategy, self.collate)
        return EvaluationLoop(self.run, self.events, probe, loader_config, self.metrics, self.compute_metrics)

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
        evaluation = self._evaluation()
        with generators_kept(self.run.strategy.device):
            metrics = evaluation.evaluate(dataset, metric_key_prefix)
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
        evaluation = self._evaluation()
        with generators_kept(self.run.strategy.device):
            output = evaluation.predict(test_dataset, metric_key_prefix)
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
        if self._probe is None:
            run.strategy.setup()
        state = run.strategy.model_state(run.model if self._probe is None else self._probe.loss.model)
        folder, size = Path(output_dir or self.args.output_dir), max_shard_size or self.args.max_shard_size
        to_host = run.strategy.device_info.to_host
        run.strategy.collectives.on_main(
            lambda: save_model_folder(folder, state, run.model, run.processing_class, size, to_host)
        )


def _full_name(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _show_log(level: str) -> None:
    """Events of a run go to stderr, unless the program has handlers of its own."""
    logger.setLevel(level.upper())
    if not logger.hasHandlers():
        logger.addHandler(logging.StreamHandler())
