"""The figures of a run's steps: kept on the device, read in one go, and judged (`nonfinite`)."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from trainer_kit.errors import NonFiniteError
from trainer_kit.run import Run
from trainer_kit.strategies.base import Strategy
from trainer_kit.strategies.grad_norms import GradientNorms


class StepSpan(NamedTuple):
    """A step that was taken, and the samples it took.

    Attributes:
        step: Its number, from 1.
        epoch: Number of the epoch, from 0.
        start: Position in the epoch before it, in samples over all processes.
        stop: Position after it.
    """

    step: int
    epoch: int
    start: int
    stop: int


class StepResult(NamedTuple):
    """Loss and gradient norm of one step, read from the device.

    Attributes:
        span: The step.
        loss: Mean over the step's items; None where it has none.
        norm: Norm of all gradients together before clipping; None where nothing asked for it.
        bad_parameter: The first whose gradient is not finite; None where all are, or where only the norm of them all is
            too large for its dtype.
        held: Whether a step that is not finite left weights and optimizer as they were, as all later ones did.
    """

    span: StepSpan
    loss: float | None
    norm: float | None
    bad_parameter: torch.Tensor | None
    held: bool = False

    @property
    def has_finite_gradient(self) -> bool:
        """Whether all gradients were finite, as far as anybody looked."""
        return self.norm is None or math.isfinite(self.norm)


class MetricBuffer:
    """Losses and gradient norms of the steps since the last reading: kept on the device, read in one go."""

    def __init__(self) -> None:
        self._waiting: list[tuple[StepSpan, torch.Tensor | None, GradientNorms | None]] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def append(self, taken: StepSpan, loss: torch.Tensor | None, norms: GradientNorms | None) -> None:
        """Keeps this process's share of a step's loss (a scalar, if it has one) and the norms of its gradients."""
        self._waiting.append((taken, loss, norms))

    def read(self, strategy: Strategy) -> list[StepResult]:
        """The figures since the last reading; waits for the device once. Losses are summed over all processes."""
        waiting, self._waiting = self._waiting, []
        losses = iter(
            strategy.collectives.read_scalars([loss for _, loss, _ in waiting if loss is not None], summed=True)
        )
        totals = iter(strategy.collectives.read_scalars([norms.total for _, _, norms in waiting if norms is not None]))
        figures = []
        for taken, share, norms in waiting:
            loss = None if share is None else next(losses)
            total = None if norms is None else next(totals)
            bad = None if norms is None or total is None or math.isfinite(total) else _first_bad(norms)
            figures.append(StepResult(taken, loss, total, bad, norms is not None and norms.held))
        return figures


def _first_bad(norms: GradientNorms) -> torch.Tensor | None:
    pairs = zip(norms.each.tolist(), norms.parameters, strict=True)
    return next((parameter for norm, parameter in pairs if not math.isfinite(norm)), None)


class StepMetrics:
    """Losses and gradient norms of a run: waiting on the device until somebody reads them into `run.state`.

    Args:
        run: Its optimizer is made.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self.history = MetricBuffer()

    def __len__(self) -> int:
        return len(self.history)

    def append(self, taken: StepSpan, has_items: bool = True) -> None:
        """Keeps the loss, if it has items to be one of, and the norms of the step that was just counted."""
        self.history.append(taken, self.run.local_loss if has_items else None, self.run.last_norms)

    def forget(self) -> None:
        """Leaves out what nobody has read: steps that are not part of the run any more."""
        self.history = MetricBuffer()

    def read(self, newest_checkpoint: Callable[[], Path | None] = lambda: None) -> None:
        """Reads what the steps since the last reading came to; waits for the device once.

        Args:
            newest_checkpoint: Asked for the one to name in the error.

        Raises:
            NonFiniteError: If a step was not finite and `nonfinite` is "stop" or "rollback".
        """
        state = self.run.state
        for figures in self.history.read(self.run.strategy):
            if self._ends_the_run(figures):
                raise self._error(figures, newest_checkpoint())
            if figures.norm is not None:
                state.grad_norm = figures.norm
            if not figures.has_finite_gradient and self._leaves_out():
                state.skipped_steps += 1
                if figures.loss is None or not math.isfinite(figures.loss):
                    continue
            if figures.loss is None:
                continue
            state.loss_sum += figures.loss
            state.loss_steps += 1
            state.interval_loss_sum += figures.loss
            state.interval_steps += 1

    def record(self) -> dict[str, Any]:
        """The record that is due: the mean loss since the last one, and where the run stands."""
        state, optimizer = self.run.state, self.run.optimizer
        assert optimizer is not None
        record: dict[str, Any] = {"step": state.step, "epoch": state.epochs}
        if state.interval_steps:
            record["loss"] = state.interval_loss_sum / state.interval_steps
        if state.grad_norm is not None:
            record["grad_norm"] = state.grad_norm
        record["learning_rate"] = float(optimizer.param_groups[0]["lr"])
        if state.skipped_steps:
            record["skipped_steps"] = state.skipped_steps
        state.interval_loss_sum, state.interval_steps = 0.0, 0
        return record

    def _leaves_out(self) -> bool:
        return self.run.args.nonfinite == "skip" or self.run.strategy.scales_gradients

    def _ends_the_run(self, figures: StepResult) -> bool:
        # fp16's scaler looks for a scale by trying: its gradients overflow now and then, by design.
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
