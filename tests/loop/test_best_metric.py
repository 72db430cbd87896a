"""The metric that chooses the best checkpoint and drives `ReduceLROnPlateau`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from kit.datasets import points
from kit.models import Linear
from kit.trainer import arguments

from trainer_kit import Callback, Run, Trainer, log_mean


def test_metric_for_best_model_that_is_not_there_names_what_is(tmp_path: Path) -> None:
    args = arguments(tmp_path, eval_strategy="steps", eval_steps=1, metric_for_best_model="f1", save_strategy="best")
    with pytest.raises(ValueError, match=r"metric_for_best_model='eval_f1' is not among .* eval_loss"):
        Trainer(Linear(), args, points(), points(4)).train()


def test_plateau_schedule_steps_at_evaluations(tmp_path: Path) -> None:
    def plateau(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.1, patience=0, threshold=0.5)

    args = arguments(tmp_path, eval_strategy="steps", eval_steps=2, learning_rate=0.1)
    trainer = Trainer(Linear(), args, points(), points(4), lr_scheduler=plateau)
    trainer.train()
    assert trainer.run.optimizer is not None
    assert trainer.run.optimizer.param_groups[0]["lr"] == pytest.approx(0.01)
    with pytest.raises(ValueError, match="ReduceLROnPlateau steps at evaluations"):
        Trainer(Linear(), arguments(tmp_path), points(), lr_scheduler=plateau).train()


def test_the_evaluation_before_the_first_step_leaves_a_plateau_schedule_alone(tmp_path: Path) -> None:
    schedules: list[int] = []

    def plateau(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)

    class Watch(Callback):
        def on_evaluate(self, run: Run, metrics: dict[str, Any]) -> None:
            schedules.append(run.lr_scheduler.last_epoch)

    args = arguments(tmp_path, eval_strategy="steps", eval_steps=2, eval_on_start=True)
    trainer = Trainer(Linear(), args, points(), points(4), lr_scheduler=plateau, callbacks=[Watch()])
    trainer.train()
    assert trainer.run.lr_scheduler.last_epoch == 2
    assert len(schedules) == 3


def test_the_evaluation_before_the_first_step_is_not_the_best(tmp_path: Path) -> None:
    """The learning rate is so high that both steps make the weights worse."""
    args = arguments(
        tmp_path, eval_strategy="steps", eval_steps=1, eval_on_start=True, save_strategy="steps", save_steps=1,
        load_best_model_at_end=True, optim="sgd", learning_rate=10.0, max_grad_norm=0, max_steps=2,
    )  # fmt: skip
    losses: list[float] = []

    class Watch(Callback):
        def on_evaluate(self, run: Run, metrics: dict[str, Any]) -> None:
            losses.append(metrics["eval_loss"])

    trainer = Trainer(Linear(), args, points(), points(4), callbacks=[Watch()])
    trainer.train()
    assert losses[0] < min(losses[1:])
    assert (trainer.run.state.best_metric, trainer.run.state.best_step) == min(zip(losses[1:], (1, 2), strict=True))


class TrainingOnly(Linear):
    """Logs a mean in training, and none in evaluations."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if self.training:
            log_mean("kl", 0.5)
        return super().forward(x, labels)


class Score(Callback):
    """Gives a metric to each record, or adds it to the record."""

    def __init__(self, adds: bool) -> None:
        self.adds = adds

    def metrics(self, run: Run) -> dict[str, Any]:
        return {} if self.adds else {"score": 0.75}

    def on_log(self, run: Run, record: dict[str, Any]) -> None:
        if self.adds:
            record["score"] = 0.75


def test_the_best_model_is_not_chosen_by_a_mean_of_the_training(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 2, "logging_steps": 2, "save_strategy": "best"}
    args = arguments(tmp_path / "kl", metric_for_best_model="kl", **changes)
    with pytest.raises(ValueError, match="metric_for_best_model='eval_kl' is not among"):
        Trainer(TrainingOnly(), args, points(), points(4)).train()
    for adds in (False, True):
        args = arguments(tmp_path / str(adds), metric_for_best_model="score", **changes)
        trainer = Trainer(TrainingOnly(), args, points(), points(4), callbacks=[Score(adds)])
        trainer.train()
        assert trainer.run.state.best_metric == 0.75


@pytest.mark.parametrize("name", ["mine", "eval_mine"])
def test_a_number_that_a_callback_adds_to_an_evaluation(name: str, tmp_path: Path) -> None:
    class Adds(Callback):
        def on_evaluate(self, run: Run, metrics: dict[str, Any]) -> None:
            metrics["mine"] = float(run.state.step)

    changes: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 2, "logging_steps": 2, "save_strategy": "best"}
    args = arguments(tmp_path, metric_for_best_model=name, greater_is_better=True, **changes)
    trainer = Trainer(Linear(), args, points(), points(4), callbacks=[Adds()])
    trainer.train()
    assert trainer.run.state.best_metric == trainer.run.state.step


@pytest.mark.parametrize("plateau", [False, True])
def test_a_resume_with_another_metric_forgets_the_best(
    plateau: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A loss below 10 and a score above 10 cannot be compared."""

    class Adds(Callback):
        priority = 40

        def on_evaluate(self, run: Run, metrics: dict[str, Any]) -> None:
            metrics["score"] = 10.0 + run.state.step

    def train(steps: int, **changes: Any) -> Trainer:
        schedule = "reduce_lr_on_plateau" if plateau else "constant"
        args = arguments(
            tmp_path, eval_strategy="steps", eval_steps=1, save_strategy="steps", save_steps=1, save_best_limit=1,
            lr_scheduler_type=schedule, max_steps=steps, **changes,
        )  # fmt: skip
        trainer = Trainer(Linear(), args, points(), points(4), callbacks=[Adds()])
        trainer.train(resume_from_checkpoint=steps > 2)
        return trainer

    by_loss = train(2, metric_for_best_model="loss")
    assert by_loss.run.state.best_metric is not None
    assert by_loss.run.state.best_metric < 10
    state = train(3, metric_for_best_model="loss").run.state
    assert "another metric" not in caplog.text
    assert state.best_metric is not None
    by_score = train(4, metric_for_best_model="score", greater_is_better=False)
    assert (by_score.run.state.best_metric, by_score.run.state.best_step) == (14.0, 4)
    assert "resumed with another metric (metric_for_best_model 'eval_loss' -> 'eval_score'): the best" in caplog.text
    if plateau:
        assert by_score.run.lr_scheduler.best == 14.0
    by_greater = train(5, metric_for_best_model="score", greater_is_better=True)
    assert (by_greater.run.state.best_metric, by_greater.run.state.best_step) == (15.0, 5)
    if plateau:
        assert (by_greater.run.lr_scheduler.best, by_greater.run.lr_scheduler.mode) == (15.0, "max")
        return  # which has a metric always
    train(6)
    found = train(7, metric_for_best_model="loss").run.state
    assert found.best_step == 7
