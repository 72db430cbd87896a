"""`Accelerator`: devices, processes, precision and checkpoints for a hand-written loop."""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import torch
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from trainer_kit.accelerator.data_loader import make_loader, with_seedable_sampler
from trainer_kit.accelerator.loader import PreparedLoader
from trainer_kit.accelerator.properties import AcceleratorProperties
from trainer_kit.accelerator.settings import (
    accumulation_settings,
    check_schedule_rule,
    compile_options,
    project_settings,
    refuse_unavailable,
    set_scaler_options,
    strategy_options,
    training_arguments,
)
from trainer_kit.accelerator.skip import SkippedLoader, skip_first_batches
from trainer_kit.accelerator.stepping import Stepping
from trainer_kit.accelerator.utils.dataclasses import (
    AutocastKwargs,
    DataLoaderConfiguration,
    FullyShardedDataParallelPlugin,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    ProfileKwargs,
    ProjectConfiguration,
    TorchDynamoPlugin,
    handlers_by_class,
)
from trainer_kit.accelerator.validation import is_stateful
from trainer_kit.accelerator.wrappers import (
    PreparedOptimizer,
    PreparedScheduler,
    compute_in_precision,
    restore_forward,
    step_rule,
)
from trainer_kit.optim import check_fused
from trainer_kit.strategies.batch_shapes import ShapeLedger
from trainer_kit.strategies.select import choose_strategy
from trainer_kit.utils.optimizer_state import check_optimizer_state
from trainer_kit.utils.user_warnings import warn
from trainer_kit.utils.wrappers import without_wrappers

logger = logging.getLogger("trainer_kit")


class Accelerator(Stepping, AcceleratorProperties):
    """Runs a hand-written loop on any hardware and any number of processes.

    It uses accelerate's names: a loop written for accelerate runs after a change of the import:

        accelerator = Accelerator(gradient_accumulation_steps=2)
        model, optimizer, loader, scheduler = accelerator.prepare(
            model, optimizer, loader, scheduler
        )
        for epoch in range(3):
            for inputs, targets in loader:
                with accelerator.accumulate(model):
                    loss = loss_function(model(inputs), targets)
                    accelerator.backward(loss)
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()

    Gradients are the mean over processes and over accumulated batches of the gradients of `loss`.

    A prepared scheduler steps once per process with every optimizer step, as under accelerate: create it from
    `len(loader)` before `prepare`, or set `step_scheduler_with_optimizer="once"`.

    Two things differ from accelerate. After `load_state` an interrupted loader resumes after its last batch by itself;
    `skip_first_batches(loader, n)` counts the n batches from the beginning of that epoch. The order of a loader is a
    function of its seed and epoch (see `PreparedLoader`): call `set_seed` before `prepare`.

    Args:
        device_placement: Whether prepared loaders move their batches to the device.
        split_batches: See `DataLoaderConfiguration`.
        mixed_precision: Precision of prepared models: "no", "fp16", "bf16" or "fp8", see `TrainingArguments`; None for
            that of an Accelerator in use, else the launcher's choice, else "no". Their outputs are float32.
        gradient_accumulation_steps: Batches per optimizer step on each process; see `accumulate`.
        cpu: Whether to train on the CPU even where there is an accelerator; the launcher can also request it.
        dataloader_config: See `DataLoaderConfiguration`.
        deepspeed_plugin: Must be None, like `deepspeed_plugins`, `torch_tp_plugin`, `megatron_lm_plugin` and
            `parallelism_config`: these features are not available.
        fsdp_plugin: Shards the model over the processes, as `trainer-kit launch --fsdp` does, with these options; None:
            the launcher's choice.
        rng_types: Without effect: the order of loaders is the same on all processes.
        log_with: "tensorboard", "jsonl" (`log.jsonl`), "all" of these, an object with `log(values, step)`, or a list.
        project_dir: See `ProjectConfiguration`.
        project_config: See `ProjectConfiguration`; its `project_dir` takes precedence.
        gradient_accumulation_plugin: Settings in place of `gradient_accumulation_steps`.
        step_scheduler_with_optimizer: When prepared schedulers step. True: with the optimizer, once per process (on XLA
            per device), or once in all with `split_batches`, so that a schedule made for one process ends at the same
            sample on several. "once": once with the optimizer, whatever the number of processes, for a schedule made
            from `len(loader)` after `prepare`. False: at each call, for example once an epoch.
        kwargs_handlers: Objects such as `DistributedDataParallelKwargs`, `InitProcessGroupKwargs`, `GradScalerKwargs`,
            `AutocastKwargs` and `ProfileKwargs`, at most one of each.
        dynamo_backend: Name of the compiler of `torch.compile` for prepared models; None: the launcher's choice, else
            no compilation.
        dynamo_plugin: Settings in place of `dynamo_backend`.
        downcast_bf16: On XLA, see `trainer_kit.XLA`: prepared models and their batches are cast to bfloat16;
            outputs are float32. Without effect elsewhere.

    Raises:
        ValueError: If an argument is invalid, arguments contradict one another, or the processes cannot connect.
        TypeError: If a handler or tracker is of the wrong kind.
    """

    def __init__(
        self,
        device_placement: bool = True,
        split_batches: bool = False,
        mixed_precision: str | None = None,
        gradient_accumulation_steps: int = 1,
        cpu: bool = False,
        dataloader_config: DataLoaderConfiguration | None = None,
        deepspeed_plugin: Any = None,
        fsdp_plugin: FullyShardedDataParallelPlugin | None = None,
        torch_tp_plugin: Any = None,
        megatron_lm_plugin: Any = None,
        rng_types: Sequence[str] | None = None,
        log_with: Any = None,
        project_dir: str | os.PathLike[str] | None = None,
        project_config: ProjectConfiguration | None = None,
        gradient_accumulation_plugin: GradientAccumulationPlugin | None = None,
        step_scheduler_with_optimizer: bool | Literal["once"] = True,
        kwargs_handlers: Iterable[Any] | None = None,
        dynamo_backend: str | None = None,
        dynamo_plugin: TorchDynamoPlugin | None = None,
        deepspeed_plugins: Any = None,
        parallelism_config: Any = None,
        *,
        downcast_bf16: bool = False,
    ) -> None:
        refuse_unavailable(
            deepspeed_plugin=deepspeed_plugin, torch_tp_plugin=torch_tp_plugin, megatron_lm_plugin=megatron_lm_plugin,
            deepspeed_plugins=deepspeed_plugins, parallelism_config=parallelism_config,
        )  # fmt: skip
        check_schedule_rule(step_scheduler_with_optimizer)
        if rng_types:
            warn("Accelerator: rng_types has no effect: loaders draw the same order on all processes")
        self.dataloader_config = dataloader_config or DataLoaderConfiguration()
        self.split_batches = split_batches or self.dataloader_config.split_batches
        self.rng_types = rng_types
        self.device_placement = device_placement
        self.step_scheduler_with_optimizer = step_scheduler_with_optimizer
        self.fsdp_plugin = fsdp_plugin
        self.compile_options = compile_options(dynamo_backend, dynamo_plugin)
        self.handlers = handlers_by_class(kwargs_handlers or ())
        self.autocast_handler = self.handlers.get(AutocastKwargs)
        self.profile_handler = self.handlers.get(ProfileKwargs)
        args = training_arguments(mixed_precision, cpu, fsdp_plugin)
        strategy = choose_strategy(
            args, downcast_bf16=downcast_bf16, **strategy_options(self.handlers, fsdp_plugin)
        )  # fmt: skip
        set_scaler_options(strategy, self.handlers.get(GradScalerKwargs))
        accumulation = accumulation_settings(gradient_accumulation_steps, gradient_accumulation_plugin)
        super().__init__(strategy, log_with, project_settings(project_dir, project_config), accumulation)
        self.strategy.shapes = ShapeLedger(by_hand=True)
        self.strategy.setup()
        self._settings = {
            "mixed_precision": self.mixed_precision,
            "gradient_accumulation_steps": self.gradient_accumulation_steps,
            "split_batches": self.split_batches,
            "step_scheduler_with_optimizer": step_scheduler_with_optimizer,
            "downcast_bf16": downcast_bf16,
        }

    @property
    def mixed_precision(self) -> str:
        """Precision of prepared models: "no", "fp16", "bf16" or "fp8"."""
        precision = self.strategy.precision
        return "no" if precision is None else precision.mode

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether an optimizer skipped its last step because fp16 gradients overflowed; may wait for the device."""
        return any(optimizer.step_was_skipped for optimizer in self._prepared.optimizers)

    # Preparing

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """Prepare models, optimizers, DataLoaders and schedulers for the hardware and the processes.

        Args:
            args: Objects in any order; others are returned unchanged.
            device_placement: For each of `args`, whether a loader among them moves its batches; None for the
                Accelerator's own setting. Models are moved under any value.

        Returns:
            The prepared objects, in the same order; a single object is not wrapped in a tuple.

        Raises:
            ValueError: If a model or loader cannot be prepared; the message says why.
        """
        placement = device_placement if device_placement is not None else [self.device_placement] * len(args)
        results = [*args]
        for number in sorted(range(len(args)), key=lambda number: _order(args[number])):
            results[number] = self._prepare_one(args[number], placement[number])
        return results[0] if len(results) == 1 else tuple(results)

    def _prepare_one(self, thing: Any, placement: bool) -> Any:
        if isinstance(thing, (PreparedOptimizer, PreparedScheduler, SkippedLoader)):
            return thing
        if isinstance(thing, torch.nn.Module):
            return self.prepare_model(thing, placement)
        if isinstance(thing, torch.optim.Optimizer):
            return self.prepare_optimizer(thing)
        if isinstance(thing, DataLoader):
            return self.prepare_data_loader(thing, placement)
        if isinstance(thing, LRScheduler):
            return self.prepare_scheduler(thing)
        if is_stateful(thing):
            logger.info(
                "prepare() leaves a %s as it is; register_for_checkpointing() makes it part of checkpoints",
                type(thing).__name__,
            )
        return thing

    def prepare_model(
        self, model: torch.nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> torch.nn.Module:
        """Move a model to the device, in place, and prepare it for the processes and the precision.

        Args:
            model: The user's model; a prepared one is returned unchanged.
            device_placement: Without effect: models are moved to the device. False is warned of where that moves one.
            evaluation_mode: Whether the model is not trained: it is not wrapped for the exchange of gradients. A
                sharded strategy shards it nevertheless.

        Returns:
            The model to call.
        """
        if any(each is model for each in self._prepared.models):
            return model
        if device_placement is False and any(each.device.type != self.device.type for each in model.parameters()):
            warn(f"Accelerator: device_placement=False has no effect on models: one is moved to {self.device}")
        if self.mixed_precision != "no" or getattr(self.strategy, "downcast_bf16", False):
            compute_in_precision(model, self.autocast)
        if self.fsdp_plugin is not None and self.fsdp_plugin.activation_checkpointing:
            self.strategy.enable_activation_checkpointing(model)
        if self.compile_options is not None:
            self.strategy.compile(model, self.compile_options)
        if evaluation_mode and not self.strategy.sharding.is_active:
            prepared = model.to(self.device)
        else:
            prepared = self.strategy.prepare(model)
        self._prepared.models.append(prepared)
        for optimizer in self._prepared.optimizers:  # prepared by an earlier call
            self.strategy.prepare_optimizer(optimizer.optimizer)
        return prepared

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None
    ) -> PreparedOptimizer:
        """Return an optimizer that steps only at the end of an optimizer step.

        Args:
            optimizer: The user's optimizer. A warning is logged if `save_state` cannot save it.
            device_placement: Without effect: the state is where the parameters are.

        Raises:
            ValueError: If the optimizer is fused and has a parameter with gaps in memory.
        """
        prepared = PreparedOptimizer(self.strategy.prepare_optimizer(optimizer), self.strategy, self.flow)
        check_fused(prepared.optimizer)
        try:
            check_optimizer_state(prepared.optimizer)
        except Exception as error:  # of the user's own code; a loop need not save
            logger.warning("save_state() will raise: %s", error)
        self._prepared.optimizers.append(prepared)
        return prepared

    def prepare_scheduler(self, scheduler: Any) -> PreparedScheduler:
        """Return a scheduler that steps as `step_scheduler_with_optimizer` sets.

        Args:
            scheduler: The user's scheduler. It follows the prepared optimizer that it belongs to, or else all of them.
        """
        owner = getattr(scheduler, "optimizer", None)
        optimizers = self._prepared.optimizers
        own = [each for each in optimizers if owner is each or owner is each.optimizer]
        rule = step_rule(self.step_scheduler_with_optimizer, self.split_batches, self.strategy)
        prepared = PreparedScheduler(scheduler, own or optimizers, self.flow, rule)
        self._prepared.schedulers.append(prepared)
        return prepared

    def prepare_data_loader(
        self, data_loader: DataLoader[Any], device_placement: bool | None = None, slice_fn_for_dispatch: Any = None
    ) -> PreparedLoader:  # fmt: skip
        """Return a loader that yields this process's share of the batches. Collective.

        Args:
            data_loader: The user's DataLoader. One that was prepared without this Accelerator becomes its own.
            device_placement: Whether to move batches to the device; None for the Accelerator's own setting.
            slice_fn_for_dispatch: Without effect: each process reads its own batches.

        Raises:
            ValueError: If the DataLoader shards its samples itself, or cannot be split.
        """
        if isinstance(data_loader, PreparedLoader):
            if not any(each is data_loader for each in self._prepared.loaders):
                data_loader.join(self.flow)
                self._prepared.loaders.append(data_loader)
            return data_loader
        config = self.dataloader_config
        prepared = make_loader(
            self._ordered(data_loader),
            self.flow,
            number=len(self._prepared.loaders),
            split_batches=self.split_batches,
            device_placement=self.device_placement if device_placement is None else device_placement,
            even_batches=config.even_batches,
        )
        self._prepared.loaders.append(prepared)
        return prepared

    def _ordered(self, loader: DataLoader[Any]) -> DataLoader[Any]:
        config = self.dataloader_config
        return with_seedable_sampler(loader, config.data_seed, self.strategy) if config.use_seedable_sampler else loader

    def unwrap_model(
        self, model: torch.nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True
    ) -> torch.nn.Module:
        """Return the user's own module from a prepared one.

        Args:
            model: Prepared or not.
            keep_fp32_wrapper: If False, the forward pass is restored, without mixed precision.
            keep_torch_compile: If False, the wrapper of `torch.compile` is removed too.
        """
        model = self.strategy.unwrap(model)
        if not keep_fp32_wrapper:
            restore_forward(model)
        return model if keep_torch_compile else without_wrappers(model)

    def free_memory(self, *objects: Any) -> list[None]:
        """Drop all prepared objects and free cached memory; return a None for each argument."""
        self._prepared.clear()
        self.strategy.release_models()
        gc.collect()
        self.strategy.device_info.empty_cache()
        return [None] * len(objects)

    clear = free_memory
    """accelerate's other name of `free_memory`."""

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> SkippedLoader:
        """See `trainer_kit.accelerator.skip_first_batches`."""
        return skip_first_batches(dataloader, num_batches)


def _order(thing: Any) -> int:
    """Sort models first, since moving one may replace the parameters that an optimizer holds; schedulers last."""
    return 0 if isinstance(thing, torch.nn.Module) else 2 if isinstance(thing, LRScheduler) else 1
