from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from trainer_kit import NonFiniteError, Run, SingleDevice, TrainingArguments
from trainer_kit.errors import LostProcessError
from trainer_kit.loop.step_metrics import MetricBuffer, StepMetrics, StepSpan
from trainer_kit.strategies.grad_norms import GradientNorms, gradient_norms


def norms(*values: float) -> GradientNorms:
    gradients = [torch.tensor([value]) for value in values]
    return gradient_norms(gradients, gradients)


def make_figures(nonfinite: str = "stop") -> StepMetrics:
    model = torch.nn.Linear(2, 1)
    args = TrainingArguments(use_cpu=True, nonfinite=nonfinite)  # type: ignore[arg-type]
    run = Run(args, SingleDevice("cpu"), model, optimizer=torch.optim.SGD(model.parameters(), lr=0.5))
    return StepMetrics(run)


def take_step(figures: StepMetrics, loss: float, *gradients: float) -> None:
    run = figures.run
    run.state.step += 1
    run.local_loss = torch.tensor(loss)
    run.last_norms = norms(*gradients) if gradients else None
    figures.append(taken(run.state.step))


def taken(step: int) -> StepSpan:
    return StepSpan(step, 0, 4 * step - 4, 4 * step)


@contextlib.contextmanager
def lost_process(figures: StepMetrics, collective: str) -> Iterator[None]:
    """A collective breaks off."""

    def lose(*given: Any, **named: Any) -> None:
        raise LostProcessError("a connection broke")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(figures.run.strategy.collectives, collective, lose)
        yield


def test_history_gives_each_step_once() -> None:
    history = MetricBuffer()
    history.append(taken(1), torch.tensor(0.5), norms(3.0, 4.0))
    history.append(taken(2), torch.tensor(0.25), None)
    first, second = history.read(SingleDevice("cpu"))
    assert (first.span.step, first.loss, first.norm, first.bad_parameter) == (1, 0.5, 5.0, None)
    assert (second.span.step, second.loss, second.norm) == (2, 0.25, None)
    assert second.has_finite_gradient
    assert history.read(SingleDevice("cpu")) == []


def test_the_first_bad_parameter_is_found() -> None:
    history, bad = MetricBuffer(), norms(1.0, float("inf"), float("nan"))
    history.append(taken(1), torch.tensor(0.5), bad)
    (step,) = history.read(SingleDevice("cpu"))
    assert step.bad_parameter is bad.parameters[1]
    assert not step.has_finite_gradient


def test_a_record_is_the_mean_since_the_last_one() -> None:
    figures = make_figures()
    for loss in (1.0, 2.0):
        take_step(figures, loss, 3.0, 4.0)
    figures.read()
    take_step(figures, 6.0, 1.0)
    figures.read()
    record = figures.record()
    assert (record["step"], record["loss"], record["grad_norm"], record["learning_rate"]) == (3, 3.0, 1.0, 0.5)
    assert "loss" not in figures.record()
    assert (figures.run.state.loss_sum, figures.run.state.loss_steps) == (9.0, 3)


@pytest.mark.parametrize(("loss", "gradient"), [(math.nan, 1.0), (math.inf, 1.0), (1.0, math.nan)])
def test_stop_names_step_loss_and_the_checkpoint_before(loss: float, gradient: float) -> None:
    figures = make_figures()
    take_step(figures, 0.5, 1.0)
    take_step(figures, loss, gradient)
    with pytest.raises(
        NonFiniteError, match=rf"step 2 is not finite: loss {loss}, .*checkpoint-1, is from before"
    ) as raised:
        figures.read(lambda: Path("checkpoint-1"))
    assert raised.value.span == (2, 0, 4, 8)


def test_skip_counts_steps_and_leaves_their_losses_out() -> None:
    figures = make_figures("skip")
    take_step(figures, 1.0, 1.0)
    take_step(figures, math.nan, math.nan)
    figures.read()
    assert figures.run.state.skipped_steps == 1
    assert figures.record()["loss"] == 1.0


def test_ignore_replaces_nothing() -> None:
    figures = make_figures("ignore")
    take_step(figures, math.nan)
    figures.read()
    assert math.isnan(figures.record()["loss"])


def test_the_gradients_of_steps_with_incomplete_losses_are_looked_at(caplog: pytest.LogCaptureFixture) -> None:
    figures = make_figures()
    take_step(figures, 1.0, 3.0, 4.0)
    take_step(figures, math.nan, 1.0)  # only the other process knows why
    figures.drop_losses(lambda: None)
    assert figures.unread == 0
    assert "the loss of 2 steps before step 3 is in no record" in caplog.text
    take_step(figures, 1.0, 3.0, 4.0)
    take_step(figures, 1.0, math.nan)
    take_step(figures, 1.0, 1.0)
    with lost_process(figures, "gather_object"), pytest.raises(LostProcessError):
        figures.drop_losses(lambda: None)
    with pytest.raises(NonFiniteError, match="step 4"):
        figures.drop_losses(lambda: None)


def test_a_step_is_kept_if_a_process_is_lost_while_it_is_read() -> None:
    figures = make_figures()
    take_step(figures, math.nan, math.nan)
    with lost_process(figures, "read_scalars"), pytest.raises(LostProcessError):
        figures.read()
    with pytest.raises(NonFiniteError, match="step 1"):
        figures.drop_losses(lambda: None)
