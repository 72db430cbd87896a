"""`from_transformers`: an adapter for callbacks written for transformers' Trainer."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer_kit.callback import Callback
from trainer_kit.config.event_schedule import steps_between, warmup_length
from trainer_kit.config.reporters import reporters_as_data

if TYPE_CHECKING:
    from transformers import TrainerCallback

    from trainer_kit.run import Run

# Hooks of every step, defined only if the callback overrides them: each call costs some microseconds.
_FREQUENT = ("on_step_begin", "on_substep_end", "on_pre_optimizer_step", "on_optimizer_step", "on_step_end")


def from_transformers(callback: TrainerCallback | type[TrainerCallback]) -> Callback:
    """Return a trainer_kit callback that calls a transformers callback.

    The hooks get transformers' arguments: args, state and control, and as keywords model, processing_class, optimizer,
    lr_scheduler, train_dataloader and eval_dataloader (both None), logs and metrics. Flags set in the control become
    requests to the loop. `on_prediction_step` and `on_push_begin` are never called. A callback that sets
    `should_epoch_stop` raises an error.

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

    priority = 100

    def __init__(self, callback: TrainerCallback) -> None:
        from transformers import TrainerCallback, TrainerControl, TrainerState

        self.callback = callback
        self._state = TrainerState()
        self._control = TrainerControl()
        self._args: _Arguments | None = None
        for hook in _FREQUENT:
            if getattr(type(callback), hook) is not getattr(TrainerCallback, hook):
                setattr(self, hook, functools.partial(self._call, hook))

    def on_init_end(self, run: Run) -> None:
        self._call("on_init_end", run)

    def on_train_begin(self, run: Run) -> None:
        self._control.should_training_stop = False
        self._set_best(run)
        self._call("on_train_begin", run)

    def on_epoch_begin(self, run: Run) -> None:
        self._call("on_epoch_begin", run)

    def on_epoch_end(self, run: Run) -> None:
        self._call("on_epoch_end", run)

    def on_log(self, run: Run, record: dict[str, Any]) -> None:
        self._log(run, record)

    def on_evaluate(self, run: Run, metrics: dict[str, Any]) -> None:
        self._log(run, metrics)
        self._call("on_evaluate", run, metrics=dict(metrics))
        self._set_best(run)

    def on_predict(self, run: Run, metrics: dict[str, Any]) -> None:
        self._call("on_predict", run, metrics=dict(metrics))

    def on_rollback(self, run: Run, directory: Path) -> None:
        self._set_best(run)

    def on_save(self, run: Run, directory: Path) -> None:
        if directory.name == f"checkpoint-{run.state.best_step}":
            self._state.best_model_checkpoint = str(directory)
        self._call("on_save", run, step=int(directory.name.rpartition("-")[2]))  # may be of an earlier step

    def on_train_end(self, run: Run, metrics: dict[str, Any] | None) -> None:
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

    def _log(self, run: Run, values: dict[str, Any]) -> None:
        logs = {name: value for name, value in values.items() if name != "step"}
        logs["epoch"] = run.state.epochs
        self._state.log_history.append({**logs, "step": run.state.step})
        self._call("on_log", run, logs=logs)

    def _set_best(self, run: Run) -> None:
        self._state.best_metric, self._state.best_global_step = run.state.best_metric, run.state.best_step

    def _call(self, hook: str, run: Run, step: int | None = None, **event: Any) -> None:
        """Copy counters and requests into state and control, call one hook, and copy the requests back."""
        if self._args is None or self._args.run is not run:
            self._args = _Arguments(run)
        self._take_counters(run)
        self._state.global_step = run.state.step if step is None else step
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

    def _take_counters(self, run: Run) -> None:
        state, counters = self._state, run.state
        state.epoch, state.max_steps = counters.epochs, run.total_steps
        state.num_input_tokens_seen = counters.tokens
        state.num_train_epochs = math.ceil(run.args.num_train_epochs)
        state.train_batch_size = run.args.per_device_train_batch_size
        total, args = run.total_steps, run.args
        state.logging_steps, state.save_steps = (steps_between(n, total) for n in (args.logging_steps, args.save_steps))
        state.eval_steps = steps_between(args.eval_steps or args.logging_steps, total)
        state.is_world_process_zero = run.strategy.is_main
        state.is_local_process_zero = run.strategy.collectives.is_local_main


class _Arguments:
    """The run's arguments with transformers' names and methods; what the run lacks has transformers' default."""

    def __init__(self, run: Run) -> None:
        self.run = run

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # such as those that copying asks for
            raise AttributeError(name)
        values = _translated(self.run)
        if name in values:
            return values[name]
        if hasattr(self.run.args, name):
            return getattr(self.run.args, name)
        defaults = _transformers_defaults()
        if name in defaults:
            return defaults[name]
        if hasattr(_transformers_class(), name):
            raise AttributeError(f"{name!r} of transformers' TrainingArguments has no counterpart in trainer_kit")
        raise AttributeError(f"neither trainer_kit's nor transformers' TrainingArguments have {name!r}")

    def get_warmup_steps(self, num_training_steps: int) -> int:
        return warmup_length(self.run.args, num_training_steps)

    def to_dict(self) -> dict[str, Any]:
        values = {**_transformers_defaults(), **self.run.args.to_dict()}
        return values | {name: value for name, value in _translated(self.run).items() if name in values}

    def to_json_string(self) -> str:
        return json.dumps(self.to_dict(), indent=2, default=str)

    def to_sanitized_dict(self) -> dict[str, Any]:
        sizes = {name: getattr(self, name) for name in ("train_batch_size", "eval_batch_size")}
        plain = (bool, int, float, str)
        return {name: value if type(value) in plain else str(value) for name, value in (self.to_dict() | sizes).items()}


def _translated(run: Run) -> dict[str, Any]:
    """Return what the run has under other names or in another form than transformers."""
    from transformers.training_args import ParallelMode

    args, strategy = run.args, run.strategy
    compiled = args.torch_compile if isinstance(args.torch_compile, dict) else {}
    recomputed = args.gradient_checkpointing if isinstance(args.gradient_checkpointing, dict) else None
    is_on_gpu = strategy.device.type == "cuda"
    return {
        "bf16": args.mixed_precision == "bf16",
        "fp16": args.mixed_precision == "fp16",
        "tf32": {"high": True, "highest": False}.get(str(args.float32_matmul_precision)),
        "torch_compile": args.torch_compile is not False,
        "torch_compile_backend": compiled.get("backend"),
        "torch_compile_mode": compiled.get("mode"),
        "gradient_checkpointing": args.gradient_checkpointing is not False,
        "gradient_checkpointing_kwargs": recomputed,
        "warmup_steps": args.warmup_steps or args.warmup_ratio,
        "train_batch_size": args.per_device_train_batch_size,
        "per_device_eval_batch_size": args.eval_batch_size,
        "logging_dir": str(args.log_dir),
        "report_to": reporters_as_data(args.report_to),
        "project": args.project or _transformers_defaults().get("project"),
        "do_train": True,
        "do_eval": args.eval_strategy != "no",
        "device": strategy.device,
        "n_gpu": int(is_on_gpu),
        "_n_gpu": int(is_on_gpu),
        "parallel_mode": ParallelMode.DISTRIBUTED if strategy.world_size > 1 else ParallelMode.NOT_PARALLEL,
        "world_size": strategy.world_size,
        "process_index": strategy.rank,
        "local_process_index": strategy.collectives.local_rank,
        "should_log": strategy.is_main,
        "should_save": strategy.is_main,
    }


def _transformers_class() -> type:
    from transformers import TrainingArguments

    return TrainingArguments


@functools.cache
def _transformers_defaults() -> dict[str, Any]:
    defaults = {field.name: field.default for field in dataclasses.fields(_transformers_class()) if field.init}
    values = {name: None if value is dataclasses.MISSING else value for name, value in defaults.items()}
    return {name: value.value if isinstance(value, Enum) else value for name, value in values.items()}
