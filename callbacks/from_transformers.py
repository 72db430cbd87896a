"""`from_transformers`: an adapter for callbacks written for transformers' Trainer."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
import numbers
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer_kit.callback import Callback
from trainer_kit.config.event_schedule import steps_between
from trainer_kit.utils.module_modes import evaluating
from trainer_kit.utils.pytree import unflatten_state
from trainer_kit.utils.wrappers import without_wrappers_and_adapters

if TYPE_CHECKING:
    from transformers import TrainerCallback

    from trainer_kit.run import Run
    from trainer_kit.state import TrainState

    from .transformers_arguments import LiveArguments

# Hooks of every step, defined only if the callback overrides them: each call costs some microseconds.
_FREQUENT = ("on_step_begin", "on_substep_end", "on_pre_optimizer_step", "on_optimizer_step", "on_step_end")


def from_transformers(callback: TrainerCallback | type[TrainerCallback]) -> Callback:
    """Return a trainer_kit callback that calls a transformers callback.

    The hooks get transformers' arguments: args, state and control, and as keywords model, processing_class, optimizer,
    lr_scheduler, train_dataloader and eval_dataloader (both None), logs and metrics. The args are an instance of
    transformers' `TrainingArguments`; setting a field changes the run's arguments. The state's `total_flos` is
    transformers' estimate, without padding: 6 operations per token and parameter. The control's flags are requests to
    the loop: those of what is due are set, and a hook may set or clear them. Numbers that a hook adds to logs or to
    metrics are kept, but `metric_for_best_model` cannot name them. `on_prediction_step` and `on_push_begin` are never
    called. A callback that sets `should_epoch_stop` raises an error. The model is in evaluation mode in `on_evaluate`,
    `on_predict`, `on_save` and `on_train_end`, as after an evaluation of transformers.

    Args:
        callback: An instance, or a class that needs no arguments.

    Raises:
        TypeError: If it is not a transformers TrainerCallback.
        ValueError: If it needs transformers' Trainer, as W&B's does with `WANDB_LOG_MODEL`.
    """
    from transformers import TrainerCallback

    instance = callback() if isinstance(callback, type) else callback
    if not isinstance(instance, TrainerCallback):
        raise TypeError(f"from_transformers takes a transformers TrainerCallback, but got {callback!r}")
    if getattr(getattr(instance, "_log_model", None), "is_enabled", False):
        raise ValueError(
            f"{type(instance).__name__} with WANDB_LOG_MODEL makes a Trainer of transformers; give report_to='wandb' "
            "and report_artifacts=['last'] instead"
        )
    # A class with the callback's name, which errors and checkpoints show.
    adapter: type[_Adapter] = type(type(instance).__name__, (_Adapter,), {})
    return adapter(instance)


class _Adapter(Callback):
    """Translate hooks, state and control.

    transformers updates the best metric after `on_evaluate`, but this Trainer before callbacks of this priority.
    Therefore the adapter copies the best metric into the state after each `on_evaluate`.
    """

    priority = 90  # before those that show the numbers that it adds

    def __init__(self, callback: TrainerCallback) -> None:
        from transformers import TrainerControl, TrainerState

        self.callback = callback
        self._state = TrainerState()
        self._control = TrainerControl()
        self._args: LiveArguments | None = None
        self._flops_per_token = 0
        for hook in _FREQUENT:
            if self._listens_to(hook):
                setattr(self, hook, functools.partial(self._call, hook))

    def on_init_end(self, run: Run) -> None:
        # transformers' Trainer has made the folder by now.
        if self._listens_to("on_init_end") and run.strategy.collectives.is_local_main:
            with contextlib.suppress(OSError):
                Path(run.args.output_dir).mkdir(parents=True, exist_ok=True)
        self._call("on_init_end", run)

    def on_train_begin(self, run: Run) -> None:
        self._control.should_training_stop = False
        self._set_best(run.state)
        self._call("on_train_begin", run)

    def on_epoch_begin(self, run: Run) -> None:
        self._call("on_epoch_begin", run)

    def on_epoch_end(self, run: Run) -> None:
        self._call("on_epoch_end", run)

    def on_log(self, run: Run, record: dict[str, Any]) -> None:
        self._log(run, record)

    def on_evaluate(self, run: Run, metrics: dict[str, Any]) -> None:
        with evaluating(run.model):
            self._log(run, metrics)
            self._call_with_numbers("on_evaluate", run, "metrics", metrics, {**metrics, "epoch": run.state.epochs})
        self._set_best(run.state)

    def on_predict(self, run: Run, metrics: dict[str, Any]) -> None:
        with evaluating(run.model):
            self._call_with_numbers("on_predict", run, "metrics", metrics, metrics)

    def on_rollback(self, run: Run, directory: Path) -> None:
        self._set_best(run.state)

    def on_save(self, run: Run, directory: Path) -> None:
        if directory.name == f"checkpoint-{run.state.best_step}":
            self._state.best_model_checkpoint = str(directory)
        if self._listens_to("on_save"):
            counters = _counters_of(run, directory)
            self._set_best(counters)
            with evaluating(run.model):
                self._call("on_save", run, counters)
            self._set_best(run.state)

    def on_train_end(self, run: Run, metrics: dict[str, Any] | None) -> None:
        with evaluating(run.model):
            if metrics is not None:
                self._log(run, metrics)
            self._call("on_train_end", run)

    def state_dict(self) -> dict[str, Any]:
        from transformers.trainer_callback import ExportableState

        state: dict[str, Any] = {"log_history": self._state.log_history}
        state["best_model_checkpoint"] = self._state.best_model_checkpoint
        if isinstance(self.callback, ExportableState):
            state["attributes"] = self.callback.state()["attributes"]
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._state.log_history = list(state_dict["log_history"])
        self._state.best_model_checkpoint = state_dict["best_model_checkpoint"]
        for name, value in state_dict.get("attributes", {}).items():
            setattr(self.callback, name, value)

    def _listens_to(self, hook: str) -> bool:
        from transformers import TrainerCallback

        return getattr(type(self.callback), hook) is not getattr(TrainerCallback, hook)

    def _log(self, run: Run, values: dict[str, Any]) -> None:
        logs = {name: value for name, value in values.items() if name != "step"} | {"epoch": run.state.epochs}
        self._state.log_history.append({**logs, "step": run.state.step})
        self._call_with_numbers("on_log", run, "logs", values, logs)

    def _call_with_numbers(
        self, hook: str, run: Run, keyword: str, values: dict[str, Any], given: dict[str, Any]
    ) -> None:
        """Call a hook with a copy of what it is given, and add the numbers that it adds to the values."""
        found = dict(given)
        event: dict[str, Any] = {keyword: found}
        self._call(hook, run, **event)
        for name, value in found.items():
            if isinstance(value, numbers.Real) and name not in given:
                values[name] = value

    def _set_best(self, counters: TrainState) -> None:
        self._state.best_metric, self._state.best_global_step = counters.best_metric, counters.best_step

    def _call(self, hook: str, run: Run, counters: TrainState | None = None, **event: Any) -> None:
        """Copy counters and requests into state and control, call one hook, and copy the requests back.

        The counters are those of the run, unless others are given.
        """
        if self._args is None or self._args.run is not run:
            from .transformers_arguments import LiveArguments

            self._args = LiveArguments(run)
            self._flops_per_token = _flops_per_token(run.model)
        self._take_counters(run, counters or run.state)
        control, requests = self._control, run.requests
        control.should_log, control.should_evaluate = requests.log, requests.evaluate
        control.should_save, control.should_training_stop = requests.save, requests.stop
        returned = getattr(self.callback, hook)(
            self._args,
            self._state,
            control,
            model=run.model,
            processing_class=run.processing_class,
            optimizer=run.optimizer,
            lr_scheduler=run.lr_scheduler,
            train_dataloader=None,
            eval_dataloader=None,
            **event,
        )
        control = self._control = control if returned is None else returned
        if control.should_epoch_stop:
            raise ValueError("it set should_epoch_stop, but an epoch cannot be left early here; stop the training")
        requests.log, requests.evaluate = control.should_log, control.should_evaluate
        if control.should_training_stop and not requests.stop:
            requests.reason = f"{type(self).__name__} asked for it"
        requests.save, requests.stop = control.should_save, control.should_training_stop

    def _take_counters(self, run: Run, counters: TrainState) -> None:
        state = self._state
        state.global_step, state.epoch, state.max_steps = counters.step, counters.epochs, run.total_steps
        state.num_input_tokens_seen = counters.tokens
        state.total_flos = self._flops_per_token * counters.tokens
        state.num_train_epochs = sys.maxsize if run.total_epochs == math.inf else math.ceil(run.total_epochs)
        state.train_batch_size = run.args.per_device_train_batch_size
        total, args = run.total_steps, run.args
        state.logging_steps, state.save_steps = (steps_between(n, total) for n in (args.logging_steps, args.save_steps))
        state.eval_steps = steps_between(args.eval_steps or args.logging_steps, total)
        state.is_world_process_zero = run.strategy.is_main
        state.is_local_process_zero = run.strategy.collectives.is_local_main


def _counters_of(run: Run, directory: Path) -> TrainState:
    """Return the counters of a checkpoint; those of the run, with its step, if its files are on another machine."""
    step = int(directory.name.rpartition("-")[2])
    if step == run.state.step:
        return run.state
    counters = dataclasses.replace(run.state, step=step)
    with contextlib.suppress(OSError):
        trainer: Any = unflatten_state(json.loads((directory / "state" / "trainer.json").read_text("utf-8")), {})
        counters.load_state_dict(trainer["counters"])
    return counters


def _flops_per_token(model: Any) -> int:
    """Return the operations of a training step for a token, as transformers estimates them for its models; else 0."""
    from transformers import PreTrainedModel

    base: Any = without_wrappers_and_adapters(model)
    return 6 * base.num_parameters(exclude_embeddings=True) if isinstance(base, PreTrainedModel) else 0
