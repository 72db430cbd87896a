"""`Accelerator`: devices, processes, precision and checkpoints for a loop written by hand."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import logging
import os
import types
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

import torch
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from trainer_kit.accelerator.checkpointing import Prepared, States, check_stateful, is_stateful
from trainer_kit.accelerator.loader import PreparedLoader
from trainer_kit.accelerator.options import (
    DataLoaderConfiguration,
    GradientAccumulationPlugin,
    ProjectConfiguration,
    ddp_options,
)
from trainer_kit.accelerator.skip import SkippedLoader, skip_first_batches
from trainer_kit.accelerator.trackers import Tracking
from trainer_kit.accelerator.wrappers import PreparedOptimizer, PreparedScheduler, step_rule
from trainer_kit.checkpoint import save_tensors
from trainer_kit.checkpoint.format.export import save_model_folder
from trainer_kit.config import environment
from trainer_kit.config.arguments import TrainingArguments
from trainer_kit.data.sampling import mix
from trainer_kit.strategies.batch_shapes import ShapeLedger
from trainer_kit.strategies.grad_norms import gradient_norms, gradient_values
from trainer_kit.strategies.select import choose_strategy
from trainer_kit.utils.pytree import map_tensors

logger = logging.getLogger("trainer_kit")


class Accelerator(Tracking):
    """Runs a loop written by hand on whatever hardware and however many processes it is started on.

    It has accelerate's names; loops written for that run with another import::

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

    A prepared scheduler steps once for each process with every optimizer step, as under accelerate: make it from
    `len(loader)` before `prepare`, or give `step_scheduler_with_optimizer="once"`.

    Two things differ. After `load_state` a loader that was being read goes on after its last batch by itself; with
    `skip_first_batches(loader, n)` the n batches are counted from the beginning of that epoch. And the order of a
    loader is a function of its seed and epoch (see `PreparedLoader`): `set_seed` comes before `prepare`.

    Args:
        device_placement: Whether prepared loaders move their batches to the device.
        split_batches: See `DataLoaderConfiguration`.
        mixed_precision: "no", "fp16" or "bf16": what prepared models compute in; None: what the launcher was told, else
            "no". Their outputs are float32.
        gradient_accumulation_steps: Batches of one optimizer step on each process; see `accumulate`.
        cpu: Trains on the CPU even where there is an accelerator, as where the launcher was told so.
        dataloader_config: See `DataLoaderConfiguration`.
        log_with: "tensorboard", "jsonl" (`log.jsonl`), "all" of these, an object with `log(values, step)`, or a list.
        project_dir: See `ProjectConfiguration`.
        project_config: The same and more.
        gradient_accumulation_plugin: Instead of `gradient_accumulation_steps`.
        step_scheduler_with_optimizer: When prepared schedulers step. True: with the optimizer, once for each process
            (on XLA for each device), or once in all with `split_batches`, so that a schedule that one process would go
            through ends at the same sample on several. "once": with the optimizer, whatever the number of processes,
            for a schedule made from `len(loader)` after `prepare`. False: at each call, for example once an epoch.
        kwargs_handlers: `DistributedDataParallelKwargs` and `InitProcessGroupKwargs`.
        downcast_bf16: On XLA, see `trainer_kit.XLA`: prepared models and their batches are cast to bfloat16;
            outputs are float32. Without effect elsewhere.

    Raises:
        ValueError: If arguments make no sense or contradict one another, or the processes cannot meet.
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
            mixed_precision=mixed_precision or environment.mixed_precision(),  # type: ignore[arg-type]  # checked there
            use_cpu=cpu or environment.use_cpu(),
        )
        strategy = choose_strategy(args, downcast_bf16=downcast_bf16, **ddp_options(kwargs_handlers or ()))
        strategy.shapes = ShapeLedger(by_hand=True)
        super().__init__(strategy, log_with, project)
        self.strategy.setup()
        self.device_placement = device_placement
        self.split_batches = split_batches or (dataloader_config is not None and dataloader_config.split_batches)
        self.step_scheduler_with_optimizer = step_scheduler_with_optimizer
        self._prepared = Prepared()
        settings = {
            "mixed_precision": self.mixed_precision,
            "gradient_accumulation_steps": self.gradient_accumulation_steps,
            "split_batches": self.split_batches,
            "step_scheduler_with_optimizer": step_scheduler_with_optimizer,
            "downcast_bf16": downcast_bf16,
        }
        self._states = States(self.strategy, self.flow, self._prepared, project, settings)

    @property
    def mixed_precision(self) -> str:
        """What prepared models compute in: "no", "fp16" or "bf16"."""
        precision = self.strategy.precision
        return "no" if precision is None else precision.mode

    @property
    def gradient_accumulation_steps(self) -> int:
        """Batches of one optimizer step on each process; may be set."""
        return self._accumulation.num_steps

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, steps: int) -> None:
        self._accumulation = dataclasses.replace(self._accumulation, num_steps=steps)

    @property
    def sync_gradients(self) -> bool:
        """Whether the batch at hand ends an optimizer step: gradients are complete, the optimizer steps."""
        return self.flow.sync_gradients

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether an optimizer left out its last step because fp16's gradients had overflowed."""
        return any(optimizer.step_was_skipped for optimizer in self._prepared.optimizers)

    @property
    def save_iteration(self) -> int:
        """Number of the next checkpoint that is given no folder."""
        return self.project_configuration.iteration

    # Preparing

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """Makes models, optimizers, DataLoaders and schedulers ready for the hardware and the processes.

        Args:
            args: In any order; anything else is given back as it is.
            device_placement: For each of `args`, whether a loader among them moves its batches.

        Returns:
            What to use instead, in the same order; a single object not in a tuple.

        Raises:
            ValueError: If a model or loader cannot be prepared, saying why.
        """
        placement = device_placement if device_placement is not None else [self.device_placement] * len(args)
        made: dict[int, Any] = {}
        for number in sorted(range(len(args)), key=lambda number: _order(args[number])):
            made[number] = self._prepare_one(args[number], placement[number])
        results = tuple(made[number] for number in range(len(args)))
        return results[0] if len(results) == 1 else results

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
        """Moves a model to the device, in place, and returns what to call instead of it."""
        if any(each is model for each in self._prepared.models):
            return model
        if self.mixed_precision != "no" or getattr(self.strategy, "downcast_bf16", False):
            _compute_in_precision(model, self.autocast)
        prepared = self.strategy.prepare(model)
        self._prepared.models.append(prepared)
        for optimizer in self._prepared.optimizers:  # by a call before this one
            self.strategy.prepare_optimizer(optimizer.optimizer)
        return prepared

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer) -> PreparedOptimizer:
        """Returns an optimizer that steps only where an optimizer step ends."""
        prepared = PreparedOptimizer(self.strategy.prepare_optimizer(optimizer), self.strategy, self.flow)
        self._prepared.optimizers.append(prepared)
        return prepared

    def prepare_scheduler(self, scheduler: Any) -> PreparedScheduler:
        """Returns a scheduler that steps as `step_scheduler_with_optimizer` says."""
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
        """Returns a loader that gives this process its share of the batches; all processes take part."""
        sampler = getattr(data_loader.sampler, "generator", None) or data_loader.generator
        seed = torch.initial_seed() if sampler is None else sampler.initial_seed()
        number = len(self._prepared.loaders)
        prepared = PreparedLoader(
            data_loader,
            self.strategy,
            self.flow,
            mix(self.strategy.collectives.broadcast(seed), number),  # two loaders of one length are not shuffled alike
            self.split_batches,
            self.device_placement if device_placement is None else device_placement,
        )
        self._prepared.loaders.append(prepared)
        return prepared

    def unwrap_model(
        self, model: torch.nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True
    ) -> torch.nn.Module:
        """The user's own module under what `prepare` returned.

        Args:
            model: Prepared or not.
            keep_fp32_wrapper: With False, its forward pass is again as it was, without mixed precision.
            keep_torch_compile: With False, one that `torch.compile` made is taken off too.
        """
        model = self.strategy.unwrap(model)
        if not keep_fp32_wrapper and getattr(model.__dict__.get("forward"), "in_precision", False):
            del model.forward
        if not keep_torch_compile:
            model = getattr(model, "_orig_mod", model)
        return model

    def free_memory(self, *objects: Any) -> list[None]:
        """Lets go of everything that was prepared, and of cached memory; gives back a None for each object."""
        self._prepared.clear()
        self.strategy.release_models()
        gc.collect()
        self.strategy.device_info.empty_cache()
        return [None] * len(objects)

    clear = free_memory

    # A step

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Backpropagates the loss of this process's batch, its mean over the batch's samples.

        It is divided by the number of accumulated batches and of processes first, since gradients add up to the sum
        over all of them. That is exact for powers of two.

        Args:
            loss: A number with gradients.
            kwargs: What `torch.Tensor.backward` takes, for example `retain_graph`.

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
        """The context of one batch: forward, backward, and the optimizer's and scheduler's calls, which act only on
        the last of `gradient_accumulation_steps` batches, or on the last of a loader.

        Args:
            models: Those that are trained in it; default: all prepared ones.
        """  # noqa: D205
        self.flow.next_batch(self._accumulation.num_steps, self._accumulation.sync_with_dataloader)
        with contextlib.ExitStack() as stack:
            exchanges = self.sync_gradients or self._accumulation.sync_each_batch
            for model in () if exchanges else models or self._prepared.models:
                stack.enter_context(self.strategy.no_sync(model))
            yield

    @contextlib.contextmanager
    def no_sync(self, model: torch.nn.Module) -> Iterator[None]:
        """The context of a forward and backward pass after which no optimizer step comes: gradients stay here."""
        with self.strategy.no_sync(model):
            yield

    @contextlib.contextmanager
    def autocast(self) -> Iterator[None]:
        """The context in which a computation outside of prepared models is done in mixed precision."""
        with self.strategy.autocast():
            yield

    @torch.no_grad()
    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> torch.Tensor | None:
        """Scales the gradients down where their norm is larger.

        Args:
            parameters: Whose gradients.
            max_norm: The largest norm of all together.
            norm_type: 2 for the Euclidean norm.

        Returns:
            The norm before clipping; None while gradients accumulate, which are not clipped.
        """
        if (chosen := self._complete(parameters)) is None:
            return None
        trained = [parameter for parameter in chosen if parameter.grad is not None]
        if norm_type != 2 or not trained:
            return torch.nn.utils.clip_grad_norm_(chosen, max_norm, norm_type)
        total = gradient_norms(trained, [gradient_values(parameter) for parameter in trained]).total
        torch.nn.utils.clip_grads_with_norm_(trained, max_norm, total)
        return total

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """Clips each element of the gradients to plus or minus `clip_value`; not while gradients accumulate."""
        if (chosen := self._complete(parameters)) is not None:
            torch.nn.utils.clip_grad_value_(chosen, clip_value)

    def _complete(self, parameters: Any) -> list[torch.Tensor] | None:
        """The parameters, with fp16's scale taken out of their gradients; None where those are not complete."""
        if not self.sync_gradients:
            return None
        chosen = self.strategy.prepared_parameters([parameters] if isinstance(parameters, torch.Tensor) else parameters)
        wanted = {id(parameter) for parameter in chosen}
        for optimizer in self._prepared.optimizers:
            if any(id(parameter) in wanted for group in optimizer.param_groups for parameter in group["params"]):
                self.strategy.unscale(optimizer.optimizer)
        return chosen

    # Saving and loading

    def get_state_dict(self, model: torch.nn.Module) -> dict[str, torch.Tensor]:
        """The model's tensors under the user's own names; all processes take part."""
        self.flow.dispatch()
        detached: dict[int, torch.Tensor] = {}  # tied ones stay the same object, by which alone XLA tells them
        state = self.strategy.model_state(model)
        return {name: detached.setdefault(id(value), value.detach()) for name, value in state.items()}

    def save(self, obj: Any, f: str | os.PathLike[str], safe_serialization: bool = False) -> None:
        """`torch.save` on the main process; the file is there whole or not at all, and can be read without XLA.

        Args:
            obj: Anything, or with `safe_serialization` a dict of tensors.
            f: The file.
            safe_serialization: Writes safetensors; the file's name must end with `.safetensors`.

        Raises:
            ValueError: If the name ends otherwise.
        """
        path = Path(f)
        if safe_serialization and path.suffix != ".safetensors":
            raise ValueError(f"safe_serialization=True writes safetensors, but the file is {str(path)!r}; name it so")
        if not self.is_main_process:
            return
        if safe_serialization:
            save_tensors(obj, path.parent, path.stem, to_host=self.strategy.device_info.to_host)
            return
        temporary = path.with_name(f".{path.name}.tmp")
        try:
            torch.save(map_tensors(self._readable_anywhere, obj), temporary)
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)

    def _readable_anywhere(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor on XLA could be loaded only where torch_xla is."""
        return self.strategy.device_info.to_host(tensor.detach()) if tensor.device.type == "xla" else tensor

    def save_model(
        self,
        model: torch.nn.Module,
        save_directory: str | os.PathLike[str],
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Writes the model for use: safetensors, and `config.json` where it has one; all processes take part.

        Args:
            model: Prepared or not.
            save_directory: Made where it is missing.
            max_shard_size: Bytes, or text such as "2GB".
            safe_serialization: Must be True: nothing is written as a pickle.

        Raises:
            ValueError: If `safe_serialization` is False or the size makes no sense.
        """
        _refuse_pickles(safe_serialization)
        state, module = self.get_state_dict(model), self.strategy.unwrap(model)
        folder, to_host = Path(save_directory), self.strategy.device_info.to_host
        self.strategy.collectives.on_main(
            lambda: save_model_folder(folder, state, module, None, max_shard_size, to_host)
        )

    def save_state(self, output_dir: str | os.PathLike[str] | None = None, safe_serialization: bool = True) -> str:
        """Commits a checkpoint of everything that was prepared or registered; all processes take part.

        It holds models, optimizers, schedulers, where the loaders stand, fp16's scale, the gradients of an unfinished
        optimizer step, and the generators of every process. Continuing from it is bitwise equal to going on (equal up
        to rounding where several processes save within an optimizer step, since they keep the sum of their gradients).

        Args:
            output_dir: The checkpoint's own folder, replaced as a whole where there is one; None:
                `project_dir/checkpoints/checkpoint_N`, numbered one by one, of which `total_limit` are kept.
            safe_serialization: Must be True: nothing is written as a pickle.

        Returns:
            The checkpoint's folder.

        Raises:
            ValueError: If there is no folder to write to, or one that holds other things.
        """
        _refuse_pickles(safe_serialization)
        given = None if self.project_configuration.automatic_checkpoint_naming else output_dir
        return str(self._states.save(_absolute(given)))

    def load_state(self, input_dir: str | os.PathLike[str] | None = None) -> None:
        """Takes up what `save_state` has saved, once the same objects are prepared; all processes take part.

        Args:
            input_dir: The checkpoint's folder; None: the newest one of the project that is whole.

        Raises:
            ValueError: If there is none, it is damaged, or one of other objects, naming what differs.
        """
        self._states.load(_absolute(input_dir))

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Makes objects with `state_dict` and `load_state_dict` part of every checkpoint.

        Raises:
            TypeError: If an object lacks one of them.
        """
        check_stateful(objects)
        self._prepared.registered.extend(objects)

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> SkippedLoader:
        """See `trainer_kit.accelerator.skip_first_batches`."""
        return skip_first_batches(dataloader, num_batches)


def _order(thing: Any) -> int:
    """Models come first: moving one may replace the parameters that an optimizer holds. Schedulers follow those."""
    return 0 if isinstance(thing, torch.nn.Module) else 2 if isinstance(thing, LRScheduler) else 1


def _compute_in_precision(model: torch.nn.Module, autocast: Callable[[], Any]) -> None:
    """Lets the model's own forward pass compute in mixed precision, with outputs in float32.

    A method of the instance, so that what asks for the model's class or attributes, and copies of it, work as before.
    """
    if getattr(model.__dict__.get("forward"), "in_precision", False):
        return
    inner = model.forward
    function: Any = inner.__func__ if isinstance(inner, types.MethodType) else lambda _, *args, **kw: inner(*args, **kw)

    def forward(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        with autocast():
            output = function(self, *args, **kwargs)
        return map_tensors(_to_float32, output)

    for name in ("__doc__", "__name__", "__qualname__"):
        setattr(forward, name, getattr(function, name))
    forward.__wrapped__ = function  # type: ignore[attr-defined]  # its signature is asked for
    forward.in_precision = True  # type: ignore[attr-defined]
    model.forward = types.MethodType(forward, model)


def _to_float32(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def _refuse_pickles(safe_serialization: bool) -> None:
    if not safe_serialization:
        raise ValueError("safe_serialization=False would write a pickle; only safetensors are written")


def _absolute(directory: str | os.PathLike[str] | None) -> Path | None:
    return None if directory is None else Path(directory).expanduser().absolute()
