"""Loss and gradient norms of a run's steps: kept on the device, read in one transfer, checked for `nonfinite`."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from trainer_kit.errors import NonFiniteError
from trainer_kit.loss.means import Sums, means_over_readers
from trainer_kit.run import Run
from trainer_kit.strategies.base import Strategy
from trainer_kit.strategies.grad_norms import GradientNorms
from trainer_kit.utils.units import pluralize

logger = logging.getLogger("trainer_kit")


class StepSpan(NamedTuple):
    """An optimizer step and the range of its samples.

    Attributes:
        step: Number of the step, from 1.
        epoch: Number of the epoch, from 0.
        start: Position in the epoch before the step, in samples over all processes.
        stop: Position in the epoch after the step.
    """

    step: int
    epoch: int
    start: int
    stop: int


class StepResult(NamedTuple):
    """Loss and gradient norm of one step, read from the device.

    Attributes:
        span: The step.
        loss: Mean over the step's items; None if it has no items.
        norm: Norm of all gradients together before clipping; None if it was not computed.
        bad_parameter: The first parameter with a non-finite gradient; None if all gradients are finite, or if only the
            total norm overflows its dtype.
        held: Whether a non-finite step, and every later one, leaves weights and optimizer unchanged.
        means: The means that the step's passes logged.
    """

    span: StepSpan
    loss: float | None
    norm: float | None
    bad_parameter: torch.Tensor | None
    held: bool = False
    means: Mapping[str, float] = MappingProxyType({})

    @property
    def has_finite_gradient(self) -> bool:
        """Whether the norm of all gradients is finite; true if it was not computed."""
        return self.norm is None or math.isfinite(self.norm)


class _Unread(NamedTuple):
    """Metrics of a step on the device."""

    span: StepSpan
    loss: torch.Tensor | None
    norms: GradientNorms | None
    sums: Sums


class MetricBuffer:
    """Losses and gradient norms of the steps since the last read, kept on the device."""

    def __init__(self) -> None:
        self._waiting: list[_Unread] = []

    def append(
        self, taken: StepSpan, loss: torch.Tensor | None, norms: GradientNorms | None, sums: Sums | None = None
    ) -> None:
        """Keep the metrics of a step.

        Args:
            taken: The step.
            loss: This rank's share of its loss, a scalar; None if the step has no items.
            norms: Norms of its gradients; None if they were not computed.
            sums: What this rank's passes logged.
        """
        self._waiting.append(_Unread(taken, loss, norms, sums or {}))

    def norms(self) -> Iterator[StepResult]:
        """Yield the results since the last read without their losses, which other ranks have a share of."""
        for span, _, norms, _ in self._waiting:
            if norms is not None:
                total = norms.total.item()
                bad = None if math.isfinite(total) else _first_bad(norms)
                yield StepResult(span, None, total, bad, norms.held, {})

    def read(self, strategy: Strategy) -> list[StepResult]:
        """Return the results since the last read, with losses summed over all ranks. Waits for the device once."""
        waiting = self._waiting  # kept if another process is lost meanwhile
        losses = iter(
            strategy.collectives.read_scalars([each.loss for each in waiting if each.loss is not None], summed=True)
        )
        totals = iter(
            strategy.collectives.read_scalars([each.norms.total for each in waiting if each.norms is not None])
        )
        means = means_over_readers([each.sums for each in waiting], strategy)
        figures = []
        for (taken, share, norms, _), logged in zip(waiting, means, strict=True):
            loss = None if share is None else next(losses)
            total = None if norms is None else next(totals)
            bad = None if norms is None or total is None or math.isfinite(total) else _first_bad(norms)
            figures.append(StepResult(taken, loss, total, bad, norms is not None and norms.held, logged))
        self._waiting = []
        return figures


def _first_bad(norms: GradientNorms) -> torch.Tensor | None:
    pairs = zip(norms.each.tolist(), norms.parameters, strict=True)
    return next((parameter for norm, parameter in pairs if not math.isfinite(norm)), None)


class StepMetrics:
    """Losses and gradient norms of a run, kept on the device until `read` adds them to `run.state`.

    Args:
        run: The run; its optimizer is made.

    Attributes:
        unread: Number of steps since the last read.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self.history = MetricBuffer()
        self.unread = 0

    def append(self, taken: StepSpan, has_items: bool = True) -> None:
        """Keep the gradient norms of the step just taken and, if it has items, its loss."""
        self.unread += 1
        run = self.run
        self.history.append(taken, run.local_loss if has_items else None, run.last_norms, run.local_sums)

    def forget(self) -> int:
        """Drop the unread steps, which a rollback has undone or whose losses are incomplete; return their number."""
        unread, self.history, self.unread = self.unread, MetricBuffer(), 0
        return unread

    def drop_losses(self, newest_checkpoint: Callable[[], Path | None]) -> None:
        """Drop the unread steps after a loss of processes, which had parts of their losses. Collective.

        Args:
            newest_checkpoint: See `read`.

        Raises:
            NonFiniteError: As for `read`, if a gradient is not finite; also on processes that have just joined.
        """
        first = next(filter(self._ends_the_run, self.history.norms()), None)
        own = None if first is None else self._error(first, newest_checkpoint())
        errors = [error for error in self.run.strategy.collectives.gather_object(own) if error is not None]
        if errors:
            raise errors[0]
        unread = self.forget()
        if unread:
            logger.warning(
                "the loss of %d %s before step %d is in no record: the lost processes had their parts of it",
                unread, pluralize("step", unread), self.run.state.step + 1,
            )  # fmt: skip

    def read(self, newest_checkpoint: Callable[[], Path | None] = lambda: None) -> None:
        """Add the steps since the last read to `run.state`. Waits for the device once.

        Args:
            newest_checkpoint: Returns the checkpoint to name in an error; called only for an error.

        Raises:
            NonFiniteError: If a step is not finite and `nonfinite` is "stop" or "rollback".
        """
        state, results = self.run.state, self.history.read(self.run.strategy)
        self.unread = 0
        for figures in results:
            is_finite = math.isfinite((figures.loss or 0.0) + (figures.norm or 0.0))  # the rest is for other steps
            if not is_finite and self._ends_the_run(figures):
                raise self._error(figures, newest_checkpoint())
            if figures.norm is not None:
                state.grad_norm = figures.norm
            if not is_finite and not figures.has_finite_gradient and self._leaves_out():
                state.skipped_steps += 1
                if figures.loss is None or not math.isfinite(figures.loss):
                    continue
            if figures.means:
                self.run.means.add(figures.means)
            if figures.loss is None:
                continue
            state.loss_sum += figures.loss
            state.loss_steps += 1
            state.interval_loss_sum += figures.loss
            state.interval_steps += 1

    def record(self) -> dict[str, Any]:
        """Return a record, without the callbacks' metrics.

        - `step` (steps): Optimizer steps so far.
        - `epoch` (epochs): Epochs so far, with the part of the current one.
        - `loss` (as the loss): Mean over the steps since the last record; left out if none of them had an item.
        - `NAME` (as logged): Mean of a part of the loss, or of what `log_mean("NAME", …)` logged.
        - `grad_norm` (as the gradients): Norm of all gradients of the last step, before clipping.
        - `learning_rate` (a number): Learning rate of the first group of parameters in the last step.
        - `skipped_steps` (steps): Steps so far whose gradients were not finite, so that they changed no weight.
        """
        state, optimizer = self.run.state, self.run.optimizer
        assert optimizer is not None
        record: dict[str, Any] = {"step": state.step, "epoch": state.epochs}
        if state.interval_steps:
            record["loss"] = state.interval_loss_sum / state.interval_steps
        record |= self.run.means.take()
        if state.grad_norm is not None:
            record["grad_norm"] = state.grad_norm
        rate = optimizer.param_groups[0]["lr"] if state.learning_rate is None else state.learning_rate
        record["learning_rate"] = float(rate)
        if state.skipped_steps:
            record["skipped_steps"] = state.skipped_steps
        state.interval_loss_sum, state.interval_steps = 0.0, 0
        return record

    def _leaves_out(self) -> bool:
        return self.run.args.nonfinite == "skip" or self.run.strategy.scales_gradients

    def _ends_the_run(self, figures: StepResult) -> bool:
        # fp16's scaler searches for a scale by trial: overflowing gradients are expected.
        bad_gradient = not figures.has_finite_gradient and not self.run.strategy.scales_gradients
        bad_loss = figures.loss is not None and not math.isfinite(figures.loss)
        return self.run.args.nonfinite in ("stop", "rollback") and (bad_gradient or bad_loss)

    def _error(self, figures: StepResult, newest_checkpoint: Path | None) -> NonFiniteError:
        names = [name for name, each in self.run.model.named_parameters() if each is figures.bad_parameter]
        if figures.has_finite_gradient:
            where = "no gradient was looked at" if figures.norm is None else "all gradients are finite"
        elif figures.bad_parameter is not None:
            where = f"the first parameter with a non-finite gradient is {', '.join(names) or 'not of the model'}"
        else:
            where = f"the norm of all gradients is {figures.norm}"
        kept = f"; the newest checkpoint, {newest_checkpoint}, is from before it" if newest_checkpoint else ""
        return NonFiniteError(
            f"step {figures.span.step} is not finite: loss {figures.loss}, {where}{kept}; look at the data and the "
            "learning rate, or set nonfinite='skip' to leave out such steps",
            figures.span,
            names[0] if names else None,
            figures.held and not figures.has_finite_gradient,
        )
