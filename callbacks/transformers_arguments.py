"""`LiveArguments`: the run's arguments as transformers' `TrainingArguments`, for callbacks written for them."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from typing import TYPE_CHECKING, Any

import torch
from transformers import TrainingArguments
from transformers.trainer_pt_utils import AcceleratorConfig
from transformers.trainer_utils import HubStrategy, IntervalStrategy, SaveStrategy, SchedulerType
from transformers.training_args import OptimizerNames, ParallelMode
from transformers.utils.import_utils import is_accelerate_available

from trainer_kit.config.arguments import TrainingArguments as OwnArguments
from trainer_kit.config.compile_options import CompileOptions
from trainer_kit.config.event_schedule import warmup_length
from trainer_kit.config.other_names import plain, translate
from trainer_kit.config.reporters import reporters_as_data
from trainer_kit.config.sources import OTHER_NAMES
from trainer_kit.config.transformers_names import FIELD_VALUES

if TYPE_CHECKING:
    from trainer_kit.run import Run


class LiveArguments(TrainingArguments):
    """transformers' arguments whose fields are read from a run's arguments, and written to them.

    A field that the run has in another form is translated; what the run lacks has transformers' default. Other
    attributes are those of the run's arguments, so that all callbacks share them. A copy, and what a pickle restores,
    is a `TrainingArguments` with the values of that moment.

    Args:
        run: The run.
    """

    def __init__(self, run: Run) -> None:  # not transformers' own, which sets devices up
        object.__setattr__(self, "run", run)

    def __getattr__(self, name: str) -> Any:  # what is no field in this release of transformers
        if name.startswith("__") or name == "run":
            raise AttributeError(name)
        return _read(self.run, name)

    def __setattr__(self, name: str, value: Any) -> None:
        own = self.run.args
        if name in _FIELDS or name in _OWN_FIELDS:
            _write(own, name, value)
        elif isinstance(getattr(type(self), name, None), property):
            super().__setattr__(name, value)  # which fails
        else:
            setattr(own, name, value)

    @property
    def __dict__(self) -> dict[str, Any]:  # type: ignore[override]  # for vars(args)
        return {name: getattr(self, name) for name in _FIELDS}

    def __reduce__(self) -> tuple[Any, ...]:
        return object.__new__, (TrainingArguments,), vars(self)

    def to_dict(self) -> dict[str, Any]:
        return {**self.run.args.to_dict(), **super().to_dict()}  # type: ignore[no-untyped-call]

    deepspeed_plugin = fsdp_plugin_args = None  # set by transformers' own constructor
    device = property(lambda self: self.run.strategy.device)
    n_gpu = _n_gpu = property(lambda self: int(self.device.type == "cuda"))
    world_size = property(lambda self: self.run.strategy.world_size)
    process_index = property(lambda self: self.run.strategy.rank)
    local_process_index = property(lambda self: self.run.strategy.collectives.local_rank)
    should_log = should_save = property(lambda self: self.run.strategy.is_main)
    train_batch_size = property(lambda self: self.per_device_train_batch_size)
    eval_batch_size = property(lambda self: self.per_device_eval_batch_size)

    @property
    def parallel_mode(self) -> ParallelMode:
        return ParallelMode.DISTRIBUTED if self.world_size > 1 else ParallelMode.NOT_PARALLEL

    @contextlib.contextmanager
    def main_process_first(self, local: bool = True, desc: str = "work") -> Iterator[None]:
        """Let the main process, or that of each machine, run the block before the others."""
        self.run.strategy.setup()  # before training too
        collectives = self.run.strategy.collectives
        with collectives.going_first(collectives.is_local_main if local else collectives.is_main):
            yield

    def get_warmup_steps(self, num_training_steps: int) -> int:
        return warmup_length(self.run.args, num_training_steps)


class _Field:
    """One field, read from the run under the name and in the form that it has there."""

    def __init__(self, field: dataclasses.Field[Any]) -> None:
        self.name = field.name
        self.default = None if field.default is dataclasses.MISSING else field.default

    def __get__(self, args: LiveArguments, kind: type) -> Any:
        value = _read(args.run, self.name, self.default)
        try:
            return _ENUMS[self.name](value)
        except (KeyError, ValueError):  # a plain value, or one that transformers does not have
            return value


def _read(run: Run, name: str, *default: Any) -> Any:
    return _TRANSLATED[name](run) if name in _TRANSLATED else getattr(run.args, name, *default)


def _write(own: OwnArguments, name: str, value: Any) -> None:
    """Set what stands for a field, if the arguments are valid with it."""
    values = translate(OwnArguments, {name: plain(value)}, OTHER_NAMES, FIELD_VALUES)
    if name in ("bf16", "fp16") and value is False and own.mixed_precision == name:
        values = {"mixed_precision": "no"}
    if name == "warmup_steps":
        values["warmup_ratio"] = 0.0  # which a part of all steps becomes
    for each, options in values.items():
        present = getattr(own, each)
        if isinstance(options, dict) and isinstance(present, dict) and name != each:  # one of several options
            values[each] = {**present, **options}
    checked = OwnArguments(**{**{each: getattr(own, each) for each in _OWN_FIELDS}, **values})
    for each in values:
        setattr(own, each, getattr(checked, each))


_ENUMS: Mapping[str, type[Enum]] = {
    "optim": OptimizerNames,
    "lr_scheduler_type": SchedulerType,
    "logging_strategy": IntervalStrategy,
    "eval_strategy": IntervalStrategy,
    "save_strategy": SaveStrategy,
    "hub_strategy": HubStrategy,
}


def _is_mixed(mode: str) -> Callable[[Run], bool]:
    return lambda run: (run.strategy.precision.mode if run.strategy.precision else run.args.mixed_precision) == mode


def _compilation(option: str) -> Callable[[Run], Any]:
    """Return the reader of an option of `torch_compile`; None without it."""

    def read(run: Run) -> Any:
        setting = run.args.torch_compile
        return None if setting is False else getattr(CompileOptions.read(setting), option)

    return read


def _recomputation(run: Run) -> dict[str, Any] | None:
    setting = run.args.gradient_checkpointing
    return setting if isinstance(setting, dict) else None


def _replicas(option: str) -> Callable[[Run], Any]:
    """Return the reader of an option of the strategy for replicas; None on others."""
    return lambda run: getattr(run.strategy, "options", {}).get(option)


def _timeout(run: Run) -> float:
    group = getattr(run.strategy, "group", None)
    return TrainingArguments.ddp_timeout if group is None else group.timeout


def _optimizer(run: Run) -> str:
    is_fused = run.args.optim == "adamw_torch" and getattr(run.optimizer, "defaults", {}).get("fused")
    return "adamw_torch_fused" if is_fused else run.args.optim


def _sampling(run: Run) -> str:
    return "group_by_length" if run.args.group_by_length else "random" if run.args.shuffle else "sequential"


_TRANSLATED: Mapping[str, Callable[[Run], Any]] = {
    "optim": _optimizer,
    "bf16": _is_mixed("bf16"),
    "fp16": _is_mixed("fp16"),
    "tf32": lambda run: {"high": True, "highest": False}.get(str(run.args.float32_matmul_precision)),
    "torch_compile": lambda run: run.args.torch_compile is not False,
    "torch_compile_backend": _compilation("backend"),
    "torch_compile_mode": _compilation("mode"),
    **dict.fromkeys(
        ("gradient_checkpointing", "activation_checkpointing"), lambda run: run.args.gradient_checkpointing is not False
    ),
    **dict.fromkeys(("gradient_checkpointing_kwargs", "activation_checkpointing_kwargs"), _recomputation),
    "warmup_steps": lambda run: run.args.warmup_steps or run.args.warmup_ratio,
    "per_device_eval_batch_size": lambda run: run.args.eval_batch_size,
    "report_to": lambda run: reporters_as_data(run.args.report_to),
    "project": lambda run: run.args.project or TrainingArguments.project,
    "logging_dir": lambda run: str(run.args.log_dir),
    "log_level_replica": lambda run: "error",
    "train_sampling_strategy": _sampling,
    "fsdp": lambda run: run.strategy.sharding.is_active or None,  # None before the training
    "ddp_timeout": _timeout,
    "ddp_find_unused_parameters": _replicas("find_unused_parameters"),
    "ddp_static_graph": _replicas("static_graph"),
    "ddp_bucket_cap_mb": _replicas("bucket_cap_mb"),
    "accelerator_config": lambda run: AcceleratorConfig() if is_accelerate_available() else None,
    "debug": lambda run: [],
    "full_determinism": lambda run: torch.are_deterministic_algorithms_enabled(),
    "include_num_input_tokens_seen": lambda run: "non_padding",
    "dataloader_pin_memory": lambda run: run.args.dataloader_pin_memory and not run.args.use_cpu,
}
"""Readers of what a run has under other names or in another form than some release of transformers."""

_FIELDS = {field.name: _Field(field) for field in dataclasses.fields(TrainingArguments)}
_OWN_FIELDS = [field.name for field in dataclasses.fields(OwnArguments)]
for _name, _field in _FIELDS.items():
    setattr(LiveArguments, _name, _field)
