"""The optimizer step as the training loop takes it, and the forward pass of inference."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from trainer_kit.config.arguments import TrainingArguments
from trainer_kit.loss.batch import Counts, samples_of
from trainer_kit.loss.loss import ComputeLoss, Loss, call
from trainer_kit.loss.replay import ReplayBatch, replay
from trainer_kit.memory.tracker import Tracker
from trainer_kit.strategies.base import Strategy
from trainer_kit.utils.pytree import tensors
from trainer_kit.utils.schedule_free import set_training


class Step:
    """Repeatable optimizer step that uses one micro-batch for all.

    Args:
        model: Model on the strategy's device, in training mode.
        optimizer: Optimizer of the model.
        args: Arguments of the run.
        batch: Micro-batch on the device.
        compute_loss: See `trainer_kit.loss.loss.Loss`; None for the model's own loss.
        strategy: Strategy that is set up.
        buckets: Gradient buckets of DistributedDataParallel by parameter, one for each parameter that requires a
            gradient; gradients are views of them from the last micro-batch on (`gradient_as_bucket_view`). None for no
            buckets.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        args: TrainingArguments,
        batch: Any,
        compute_loss: ComputeLoss | None,
        strategy: Strategy,
        buckets: dict[torch.Tensor, torch.Tensor] | None = None,
    ) -> None:
        self.model, self.optimizer, self.args, self.batch, self.strategy = model, optimizer, args, batch, strategy
        set_training(optimizer, True)
        self._loss = Loss.by_arguments(model, model, compute_loss, args)
        self._loss.shifts = False
        samples = samples_of(batch)
        self._counts = Counts(samples, 0, samples, samples)
        self._buckets = buckets or {}
        self._is_last = False
        self._tracker: Tracker | None = None

    def __call__(self) -> None:
        args, strategy = self.args, self.strategy
        micro_batches = [ReplayBatch(self.batch, self._counts)] * args.gradient_accumulation_steps
        shares = replay(self._loss, micro_batches, strategy)
        for number in range(1, len(micro_batches) + 1):
            self._is_last = number == len(micro_batches)
            share = next(shares)
            strategy.backward(share)
        if self._tracker is not None:
            self._tracker.begin_update()
        strategy.step(self.optimizer, args.max_grad_norm, args.max_grad_value, args.nonfinite)
        strategy.zero_grad(self.optimizer)

    def held(self) -> dict[str, list[torch.Tensor]]:
        """Return the tensors that exist before and after the step, by kind."""
        return {
            "weights": [*self.model.parameters()],
            "buffers": [*self.model.buffers()],
            "batch": [*tensors(self.batch)],
            "gradients": [*self._buckets.values()],
            "optimizer": [*tensors(dict(self.optimizer.state))],
        }

    def track(self, tracker: Tracker) -> None:
        """Take the step and mark the kinds of its tensors in `tracker`.

        Args:
            tracker: Tracker that follows the step.
        """

        def accumulated(parameter: torch.Tensor) -> None:
            if self._is_last and parameter in self._buckets:
                parameter.grad = self._buckets[parameter]
            tracker.mark("gradients", [parameter.grad])

        with contextlib.ExitStack() as stack:
            for parameter in self.model.parameters():
                if parameter.requires_grad:
                    stack.callback(parameter.register_post_accumulate_grad_hook(accumulated).remove)
            held = self.held()
            for kind, each in held.items():
                tracker.mark(kind, each)
            self._tracker = tracker
            with tracker.following():
                self()
            self._tracker = None
            state = self.held()["optimizer"]
            tracker.mark("optimizer", state) if held["optimizer"] else tracker.move_to_start("optimizer", state)


class Inference:
    """Repeatable forward pass without gradients, as evaluation and prediction take it.

    Args:
        model: Model on the strategy's device; it is set to evaluation mode.
        batch: Batch on the device.
        compute_loss: Called instead of the model, as for an `eval_loss`; None calls the model.
        strategy: Strategy that is set up.
    """

    def __init__(
        self, model: torch.nn.Module, batch: Any, compute_loss: ComputeLoss | None, strategy: Strategy
    ) -> None:
        self.model, self.batch, self.strategy = model.eval(), batch, strategy
        self._compute_loss = compute_loss

    def __call__(self) -> None:
        with torch.no_grad(), self.strategy.autocast():
            (self._compute_loss or call)(self.model, self.batch)

    def held(self) -> dict[str, list[torch.Tensor]]:
        """Return the tensors that exist before and after the pass, by kind."""
        return {
            "weights": [*self.model.parameters()],
            "buffers": [*self.model.buffers()],
            "batch": [*tensors(self.batch)],
        }

    def track(self, tracker: Tracker) -> None:
        """Take the pass and mark the kinds of its tensors in `tracker`.

        Args:
            tracker: Tracker that follows the pass.
        """
        for kind, each in self.held().items():
            tracker.mark(kind, each)
        with tracker.following():
            self()
