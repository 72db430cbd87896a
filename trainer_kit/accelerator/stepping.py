"""The training step of an `Accelerator`: backward pass, accumulation and clipping."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from trainer_kit.accelerator.checkpointing import Checkpointing
from trainer_kit.accelerator.utils.dataclasses import AutocastKwargs, ProfileKwargs
from trainer_kit.accelerator.utils.enums import DistributedType
from trainer_kit.accelerator.wrappers import PreparedOptimizer
from trainer_kit.strategies.grad_norms import clip_to_norm
from trainer_kit.utils.pytree import map_tensors
from trainer_kit.utils.user_warnings import warn


class Stepping(Checkpointing):
    """The part of an `Accelerator` that trains.

    Attributes:
        autocast_handler: Settings of mixed precision; None: the defaults.
        profile_handler: Settings of `profile`; None: the defaults.
    """

    autocast_handler: AutocastKwargs | None = None
    profile_handler: ProfileKwargs | None = None
    fp8_recipe_handler = None
    """Always None: fp8's recipe has no options."""

    @property
    def gradient_accumulation_steps(self) -> int:
        """Batches per optimizer step on each process; can be set."""
        return self.flow.settings.num_steps

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, steps: int) -> None:
        self.flow.settings = dataclasses.replace(self.flow.settings, num_steps=steps)

    @property
    def sync_gradients(self) -> bool:
        """Whether the current batch ends an optimizer step: the optimizer steps. Can be set in a loop of its own."""
        return self.flow.sync_gradients

    @sync_gradients.setter
    def sync_gradients(self, ends_step: bool) -> None:
        self.flow.sync_gradients = ends_step

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Backpropagate the loss of this process's batch, its mean over the batch's samples.

        The loss is first divided by the number of accumulated batches and of processes, since gradients are summed over
        all of them. The division is exact for powers of two.

        Args:
            loss: Scalar tensor with gradients.
            kwargs: Arguments of `torch.Tensor.backward`, for example `retain_graph`.

        Raises:
            ValueError: If there are several processes, and no model is prepared.
        """
        if not self._prepared.models and self.num_processes > 1:
            raise ValueError(
                f"backward() got a loss while no model is prepared, so that each of the {self.num_processes} processes "
                "would keep its own gradients; call prepare(model, …) before, or loss.backward() and then "
                "accelerator.reduce(parameter.grad, 'mean') for each parameter"
            )
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
        self.flow.next_batch()
        with contextlib.ExitStack() as stack:
            exchanges = self.sync_gradients or self.flow.settings.sync_each_batch
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
    def trigger_sync_in_backward(self, model: torch.nn.Module) -> Iterator[None]:
        """Enter the context of a backward pass that exchanges gradients, although its forward pass was in `no_sync`.

        Args:
            model: Prepared model.
        """
        with self.strategy.trigger_sync(model):
            yield

    @contextlib.contextmanager
    def join_uneven_inputs(self, joinables: Sequence[Any], even_batches: bool | None = None) -> Iterator[None]:
        """Enter the context of a loop whose number of batches differs between processes. Collective.

        A process that has finished takes part in the exchange of gradients until the last one has finished. At the end
        all have the weights, the buffers, and the state of optimizers and schedulers, of a process that took the most
        steps. Buffers, such as a batch norm's statistics, are sent before each forward pass too.

        Args:
            joinables: Prepared models that are trained in the loop.
            even_batches: Whether loaders repeat samples within the context; None: as they are.

        Raises:
            ValueError: If an optimizer step has several batches, and the last batch of a loader ends one.
        """
        if self.num_processes > 1 and self.state.distributed_type not in (
            DistributedType.MULTI_CPU,
            DistributedType.MULTI_GPU,
        ):
            warn(
                "join_uneven_inputs is only supported for multi-GPU and multi-CPU training without sharding: no effect"
            )
            yield
            return
        if self.num_processes > 1 and self.gradient_accumulation_steps > 1 and self.flow.settings.sync_with_dataloader:
            raise ValueError(
                "join_uneven_inputs() is not possible with "
                f"gradient_accumulation_steps={self.gradient_accumulation_steps}, since the processes' last batches "
                "would end steps at different times; give GradientAccumulationPlugin(sync_with_dataloader=False)"
            )
        before = [(loader, loader.even_batches) for loader in self._prepared.loaders]
        steps = self.flow.steps
        if even_batches is not None and any(loader.is_stream for loader, _ in before):
            warn("join_uneven_inputs(even_batches=) is only supported for map-style datasets: others stay as they are")
        try:
            for loader, _ in before:
                loader.even_batches = loader.even_batches if even_batches is None else even_batches
            with self.strategy.join_uneven(joinables):
                yield
            self._take_steps_of_longest(self.flow.steps - steps)
        finally:
            for loader, setting in before:
                loader.even_batches = setting

    def _take_steps_of_longest(self, steps: int) -> None:
        """Take the state that follows from steps from a process that took the most, where numbers differ. Collective.

        Args:
            steps: Number of optimizer steps that this process took, while the number could differ.
        """
        taken = self.strategy.collectives.gather_object(steps)
        if len({*taken}) == 1:
            return
        longest, prepared, precision = taken.index(max(taken)), self._prepared, self.strategy.precision
        own = None
        if self.process_index == longest:
            optimizers = [self.strategy.optimizer_state(each.optimizer) for each in prepared.optimizers]
            schedulers = [each.state_dict() for each in prepared.schedulers]
            scale = None if precision is None else precision.state_dict()
            own = map_tensors(lambda tensor: tensor.detach().cpu(), (optimizers, schedulers, scale, self.flow.steps))
        state = self._from(own, longest)
        if self.process_index == longest or state is None:
            return
        for optimizer, saved in zip(prepared.optimizers, state[0], strict=True):
            self.strategy.load_optimizer_state(optimizer.optimizer, saved)
        for scheduler, saved in zip(prepared.schedulers, state[1], strict=True):
            scheduler.load_state_dict(saved)
        if precision is not None:
            precision.load_state_dict(state[2])
        self.flow.steps = state[3]

    @contextlib.contextmanager
    def autocast(self, autocast_handler: AutocastKwargs | None = None) -> Iterator[None]:
        """Enter the context of a mixed-precision computation outside of prepared models.

        Args:
            autocast_handler: Settings; None: those of `kwargs_handlers`.
        """
        handler, precision = autocast_handler or self.autocast_handler, self.strategy.precision
        if handler is None or precision is None or precision.dtype is None:
            with self.strategy.autocast():
                yield
            return
        enabled, cached = handler.enabled, handler.cache_enabled
        with torch.autocast(self.device.type, dtype=precision.dtype, enabled=enabled, cache_enabled=cached):
            yield

    @contextlib.contextmanager
    def profile(self, profile_handler: ProfileKwargs | None = None) -> Iterator[Any]:
        """Enter the context of torch's profiler, and write its trace at the end if the settings name a folder.

        Args:
            profile_handler: Settings; None: those of `kwargs_handlers`.

        Yields:
            The `torch.profiler.profile`.

        Raises:
            ValueError: If an activity is not known.
        """
        settings = profile_handler or self.profile_handler or ProfileKwargs()
        with settings.build() as profiler:
            yield profiler
        if settings.output_trace_dir is not None:
            folder = Path(settings.output_trace_dir)
            folder.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(folder / f"profile_{self.process_index}.json"))

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Divide fp16's gradients by the loss scale, so that they can be read before the step.

        Args:
            optimizer: A prepared optimizer, or several; None: all of them.
        """
        given = self._prepared.optimizers if optimizer is None else optimizer
        for each in given if isinstance(given, (list, tuple)) else [given]:
            self.strategy.unscale(each.optimizer if isinstance(each, PreparedOptimizer) else each)

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """Gradient scaler of fp16; None with another precision."""
        return None if self.strategy.precision is None else self.strategy.precision.scaler

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
        if not trained:
            return torch.tensor(0.0)
        sharding = self.strategy.sharding
        grads = sharding.gradients(trained)
        if norm_type == 2:
            total = sharding.gradient_norms(trained, grads).total
        else:  # gathered before it is used: torch 2.9 would add 1e-6 to each process's share of it
            total = torch.nn.utils.get_total_norm([each.grad for each in trained if each.grad is not None], norm_type)
            total = sharding.whole_tensors({"total": total})["total"]
        clip_to_norm(grads, total, max_norm, total.item() if self.strategy.device_info.reads_without_sync else None)
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
