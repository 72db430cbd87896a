"""What the arguments of an `Accelerator` mean, together with the launcher's variables."""

from __future__ import annotations

import os
from typing import Any

from trainer_kit.accelerator.utils.dataclasses import (
    DistributedDataParallelKwargs,
    FullyShardedDataParallelPlugin,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    ProjectConfiguration,
    TorchDynamoPlugin,
)
from trainer_kit.config import environment
from trainer_kit.config.arguments import TrainingArguments
from trainer_kit.config.compile_options import CompileOptions
from trainer_kit.strategies.base import Strategy


def refuse_unavailable(**given: Any) -> None:
    """Check that no argument of a feature that is not available is given.

    Raises:
        ValueError: If one is.
    """
    for name, value in given.items():
        if value is not None:
            raise ValueError(
                f"{name} is not available; shard the model with fsdp_plugin=FullyShardedDataParallelPlugin()"
            )


def check_schedule_rule(rule: Any) -> None:
    """Check `step_scheduler_with_optimizer`.

    Raises:
        ValueError: If it is neither True, False nor "once".
    """
    if not isinstance(rule, bool) and rule != "once":
        raise ValueError(f"step_scheduler_with_optimizer={rule!r} is not known; use True, False or 'once'")


def training_arguments(
    mixed_precision: Any, cpu: bool, fsdp_plugin: FullyShardedDataParallelPlugin | None
) -> TrainingArguments:
    """Return the arguments that choose a strategy; the launcher's choice counts where one is not given."""
    precision: Any = str(mixed_precision).lower() if mixed_precision else environment.mixed_precision()
    return TrainingArguments(
        strategy="auto" if fsdp_plugin is None else "fsdp",
        mixed_precision=precision,
        use_cpu=cpu or environment.use_cpu(),
    )


def accumulation_settings(steps: int, plugin: GradientAccumulationPlugin | None) -> GradientAccumulationPlugin:
    """Return the settings of gradient accumulation; the launcher's number counts if no argument is given.

    Raises:
        ValueError: If both arguments are given, or the number is below 1.
    """
    if plugin is None:
        return GradientAccumulationPlugin(steps if steps != 1 else environment.gradient_accumulation_steps())
    if steps != 1:
        raise ValueError("give gradient_accumulation_steps or gradient_accumulation_plugin, not both")
    return plugin


def project_settings(
    project_dir: str | os.PathLike[str] | None, project: ProjectConfiguration | None
) -> ProjectConfiguration:
    """Return where files go; the configuration's folder takes precedence."""
    project = project if project is not None else ProjectConfiguration()
    if project.project_dir is None:
        project.project_dir = project_dir
    return project


def compile_options(backend: str | None, plugin: TorchDynamoPlugin | None) -> CompileOptions | None:
    """Return the options of `torch.compile`; None if nothing is compiled.

    Raises:
        ValueError: If both arguments are given, or the backend is not known.
    """
    if backend is not None and plugin is not None:
        raise ValueError("give dynamo_backend or dynamo_plugin, not both")
    return (plugin or TorchDynamoPlugin(backend=backend)).compile_options()


def strategy_options(handlers: dict[type, Any], fsdp_plugin: FullyShardedDataParallelPlugin | None) -> dict[str, Any]:
    """Return the arguments of the strategy that is chosen where there are several processes."""
    options: dict[str, Any] = {}
    for kind in (DistributedDataParallelKwargs, InitProcessGroupKwargs):
        if kind in handlers:
            options |= handlers[kind].options()
    return options if fsdp_plugin is None else options | fsdp_plugin.options()


def set_scaler_options(strategy: Strategy, handler: GradScalerKwargs | None) -> None:
    """Let fp16's gradient scaler be made with the given arguments."""
    if handler is not None and strategy.precision is not None:
        strategy.precision.scaler_options = handler.to_kwargs()
