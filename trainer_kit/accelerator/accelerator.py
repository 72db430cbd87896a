"""`Accelerator`: devices, processes, precision and checkpoints for a hand-written loop."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import logging
import os
from collections.abc import Iterable, Iterator
from typing import Any, Literal

import torch
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from trainer_kit.accelerator.checkpointing import Checkpointing
from trainer_kit.accelerator.loader import PreparedLoader
from trainer_kit.accelerator.options import (
    DataLoaderConfiguration,
    FullyShardedDataParallelPlugin,
    GradientAccumulationPlugin,
    ProjectConfiguration,
    ddp_options,
)
from trainer_kit.accelerator.skip import SkippedLoader, skip_first_batches
from trainer_kit.accelerator.validation import is_stateful
from trainer_kit.accelerator.wrappers import PreparedOptimizer, PreparedScheduler, compute_in_precision, step_rule
from trainer_kit.config import environment
from trainer_kit.config.arguments import TrainingArguments
from trainer_kit.data.sampling import mix
from trainer_kit.optim import check_fused
from trainer_kit.strategies.batch_shapes import ShapeLedger
from trainer_kit.strategies.select import choose_strategy
from trainer_kit.utils.optimizer_state import check_optimizer_state

logger = logging.getLogger("trainer_kit")


class Accelerator(Checkpointing):
    """Runs a hand-written loop on any hardware and any number of processes.

    It uses accelerate's names: a loop written for accelerate runs after a change of the import::

        accelerator = Accelerator(gradient_accumulation_steps=2)
        model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
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
            the launcher's choice, else "no". Their outputs are float32.
        gradient_accumulation_steps: Batches per optimizer step on each process; see `accumulate`.
        cpu: Whether to train on the CPU even where there is an accelerator; the launcher can also request it.
        dataloader_config: See `DataLoaderConfiguration`.
        fsdp_plugin: Shards the model over the processes, as `trainer-kit launch --fsdp` does, with these options; None:
            the launcher's choice.
        log_with: "tensorboard", "jsonl" (`log.jsonl`), "all" of these, an object with `log(values, step)`, or a list.
        project_dir: See `ProjectConfiguration`.
        project_config: See `ProjectConfiguration`; its `project_dir` takes precedence.
        gradient_accumulation_plugin: Settings in place of `gradient_accumulation_steps`.
        step_scheduler_with_optimizer: When prepared schedulers step. True: with the optimizer, once per process (on XLA
            per device), or once in all with `split_batches`, so that a schedule made for one process ends at the same
            sample on several. "once": once with the optimizer, whatever the number of processes, for a schedule made
            from `len(loader)` after `prepare`. False: at each call, for example once an epoch.
        kwargs_handlers: `DistributedDataParallelKwargs` and `InitProcessGroupKwargs`.
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
        *,
        fsdp_plugin: FullyShardedDataParallelPlugin | None = None,
        log_with: Any = None,
        project_dir: str | os.PathLike[str] | None = None,
        project_config: ProjectConfiguration | None = None,
        gradient_accumulation_plugin: GradientAccumulationPlugin | None = None,
        step_scheduler_with_optimizer: bool | Literal["once"] = True,
        kwargs_handlers: Iterable[Any] | None = None,
        downcast_bf16: bool = False,
    ) -> None:
        if not isinstance(step_scheduler_with_optimizer, bool) and step_scheduler_with_optimizer != "once":
            raise ValueError(
                f"step_scheduler_with_optimizer={step_scheduler_with_optimizer!r} is not known; use True, False or "
                "'once'"
            )
        if gradient_accumulation_plugin is not None and gradient_accumulation_steps != 1:
            raise ValueError("give gradient_accumulation_steps or gradient_accumulation_plugin, not both")
        self._accumulation = gradient_accumulation_plugin or GradientAccumulationPlugin(gradient_accumulation_steps)
        project = project_config if project_config is not None else ProjectConfiguration()
        if project.project_dir is None:
            project.project_dir = project_dir
        args = TrainingArguments(
            strategy="auto" if fsdp_plugin is None else "fsdp",
            mixed_precision=mixed_precision or environment.mixed_precision(),  # type: ignore[arg-type]  # checked there
            use_cpu=cpu or environment.use_cpu(),
        )
        options = ddp_options(kwargs_handlers or ()) | ({} if fsdp_plugin is None else fsdp_plugin.options())
        strategy = choose_strategy(args, downcast_bf16=downcast_bf16, **options)
        strategy.shapes = ShapeLedger(by_hand=True)
        super().__init__(strategy, log_with, project)
        self.strategy.setup()
        self.device_placement = device_placement
        self.split_batches = split_batches or (dataloader_config is not None and dataloader_config.split_batches)
        self.step_scheduler_with_optimizer = step_scheduler_with_optimizer
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
    def gradient_accumulation_steps(self) -> int:
        """Batches per optimizer step on each process; can be set."""
        return self._accumulation.num_steps

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, steps: int) -> None:
        self._accumulation = dataclasses.replace(self._accumulation, num_steps=steps)

    @property
    def sync_gradients(self) -> bool:
        """Whether the current batch ends an optimizer step: gradients are complete, and the optimizer steps."""
        return self.flow.sync_gradients

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
                Accelerator's own setting.

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
        if isinstance(thing, (PreparedOptimizer, PreparedScheduler, PreparedLoader, SkippedLoader)):
            return thing
        if isinstance(thing, torch.nn.Module):
            return self.prepare_model(thing)
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

    def prepare_model(self, model: torch.nn.Module) -> torch.nn.Module:
        """Move a model to the device, in place, and prepare it for the processes and the precision.

        Args:
            model: The user's model; a prepared one is returned unchanged.

        Returns:
            The model to call.
        """
        if any(each is model for each in self._prepared.models):
            return model
        if self.mixed_precision != "no" or getattr(self.strategy, "downcast_bf16", False):
            compute_in_precision(model, self.autocast)
        prepared = self.strategy.prepare(model)
        self._prepared.models.append(prepared)
        for optimizer in self._prepared.optimizers:  # prepared by an earlier call
            self.strategy.prepare_optimizer(optimizer.optimizer)
        return prepared

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer) -> PreparedOptimizer:
        """Return an optimizer that steps only at the end of an optimizer step.

        Args:
            optimizer: The user's optimizer. A warning is logged if `save_state` cannot save it.

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
        self, data_loader: DataLoader[Any], device_placement: bool | None = None
    ) -> PreparedLoader:  # fmt: skip
        """Return a loader that yields this process's share of the batches. Collective.

        Args:
            data_loader: The user's DataLoader.
            device_placement: Whether to move batches to the device; None for the Accelerator's own setting.

        Raises:
            ValueError: If the DataLoader shards its samples itself, or cannot be split.
        """
        sampler = getattr(data_loader.sampler, "generator", None) or data_loader.generator
        seed = torch.initial_seed() if sampler is None else sampler.initial_seed()
        number = len(self._prepared.loaders)
        prepared = PreparedLoader(
            data_loader,
            self.strategy,
            self.flow,
            mix(self.strategy.collectives.broadcast(seed), number),  # loaders of equal length get different orders
            self.split_batches,
            self.device_placement if device_placement is None else device_placement,
        )
        self._prepared.loaders.append(prepared)
        return prepared

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
        if not keep_fp32_wrapper and getattr(model.__dict__.get("forward"), "in_precision", False):
            del model.forward
        if not keep_torch_compile:
            model = getattr(model, "_orig_mod", model)
        return model

    def free_memory(self, *objects: Any) -> list[None]:
        """Drop all prepared objects and free cached memory; return a None for each argument."""
        self._prepared.clear()
        self.strategy.release_models()
        gc.collect()
        self.strategy.device_info.empty_cache()
        return [None] * len(objects)

    clear = free_memory

    # Training step

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Backpropagate the loss of this process's batch, its mean over the batch's samples.

        The loss is first divided by the number of accumulated batches and of processes, since gradients are summed over
        all of them. The division is exact for powers of two.

        Args:
            loss: Scalar tensor with gradients.
            kwargs: Arguments of `torch.Tensor.backward`, for example `retain_graph`.

        Raises:
            ValueError: If no model is prepared.
        """
        if not self._prepared.models:
            raise ValueError("backward() comes after prepare(model, …), which was not called")
        self.flow.trained += 1
        share = self.gradient_accumulation_steps * self.num_processes
        self.strategy.backward(loss if share == 1 else loss / share, **kwargs)

    @contextlib.contextmanager
    def accumulate(self, *models: torch.nn.Module) -> Iterator[None]:
        """Enter the context of one batch: forward, backward, and the calls of the optimizer and the scheduler.

        The calls take effect only on the last of `gradient_accumulation_steps` batches, or on the last batch of a
        loader.

        Args:
            models: Models that are trained in it; default: all prepared ones.
        """
        self.flow.next_batch(self._accumulation.num_steps, self._accumulation.sync_with_dataloader)
        with contextlib.ExitStack() as stack:
            exchanges = self.sync_gradients or self._accumulation.sync_each_batch
            for model in () if exchanges else models or self._prepared.models:
                stack.enter_context(self.strategy.no_sync(model))
            yield

    @contextlib.contextmanager
    def no_sync(self, model: torch.nn.Module) -> Iterator[None]:
        """Enter the context of a forward and backward pass that no optimizer step follows: gradients stay local.

        Args:
            model: Prepared model whose gradients stay local.
        """
        with self.strategy.no_sync(model):
            yield

    @contextlib.contextmanager
    def autocast(self) -> Iterator[None]:
        """Enter the context of a mixed-precision computation outside of prepared models."""
        with self.strategy.autocast():
            yield

    @torch.no_grad()
    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> torch.Tensor | None:
        """Scale the gradients down if their norm exceeds `max_norm`.

        Args:
            parameters: Parameters whose gradients are clipped.
            max_norm: Largest norm of all gradients together.
            norm_type: Order of the norm; 2 for the Euclidean norm.

        Returns:
            The norm before clipping; None while gradients accumulate, which are not clipped.
        """
        if (chosen := self._complete(parameters)) is None:
            return None
        trained = [parameter for parameter in chosen if parameter.grad is not None]
        if norm_type != 2 or not trained:
            total = torch.nn.utils.clip_grad_norm_(chosen, max_norm, norm_type)
            return self.strategy.sharding.whole_tensors({"total": total})["total"]
        grads = self.strategy.sharding.gradients(trained)
        total = self.strategy.sharding.gradient_norms(trained, grads).total
        # max_norm / (total + 1e-6), at most 1, as in torch.nn.utils.clip_grad_norm_.
        torch._foreach_mul_(grads, (max_norm / (total + 1e-6)).clamp(max=1.0))
        return total

    @torch.no_grad()
    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """Clip each element of the gradients to ±`clip_value`; do nothing while gradients accumulate.

        Args:
            parameters: Parameters whose gradients are clipped.
            clip_value: Largest absolute value.
        """
        if (chosen := self._complete(parameters)) is not None:
            grads = self.strategy.sharding.gradients([each for each in chosen if each.grad is not None])
            torch._foreach_clamp_min_(grads, -clip_value)
            torch._foreach_clamp_max_(grads, clip_value)

    def _complete(self, parameters: Any) -> list[torch.Tensor] | None:
        """Return the parameters, with gradients unscaled from fp16; None while gradients accumulate."""
        if not self.sync_gradients:
            return None
        chosen = self.strategy.prepared_parameters([parameters] if isinstance(parameters, torch.Tensor) else parameters)
        wanted = {id(parameter) for parameter in chosen}
        for optimizer in self._prepared.optimizers:
            if any(id(parameter) in wanted for group in optimizer.param_groups for parameter in group["params"]):
                self.strategy.unscale(optimizer.optimizer)
        return chosen

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> SkippedLoader:
        """See `trainer_kit.accelerator.skip_first_batches`."""
        return skip_first_batches(dataloader, num_batches)


def _order(thing: Any) -> int:
    """Sort models first, since moving one may replace the parameters that an optimizer holds; schedulers last."""
    return 0 if isinstance(thing, torch.nn.Module) else 2 if isinstance(thing, LRScheduler) else 1
