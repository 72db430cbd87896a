"""What comes between the steps of a training, and at its end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from kit.datasets import points
from kit.models import Linear
from kit.trainer import arguments

from trainer_kit import (
    Callback,
    Run,
    Trainer,
)
from trainer_kit.callback import HOOKS


def test_hooks_come_in_the_documented_order(tmp_path: Path) -> None:
    calls: list[str] = []

    class Listener(Callback):
        pass

    for hook in HOOKS:
        setattr(Listener, hook, lambda self, run, *rest, hook=hook: calls.append(hook))
    args = arguments(
        tmp_path, num_train_epochs=2, max_steps=-1, gradient_accumulation_steps=2, per_device_train_batch_size=5,
        eval_strategy="epoch", logging_steps=2, save_strategy="steps", save_steps=2, async_save=False,
    )  # fmt: skip
    Trainer(Linear(), args, points(), points(4), callbacks=[Listener()]).train()
    step = ["on_step_begin", "on_substep_end", "on_pre_optimizer_step", "on_optimizer_step", "on_step_end"]
    evaluation = ["on_evaluate_begin", "on_evaluate_end", "on_evaluate"]
    epoch = ["on_epoch_begin", *step, *step, "on_epoch_end", "on_log", *evaluation, "on_save"]
    assert calls == ["on_init_end", "on_train_begin", *epoch, *epoch, "on_train_end", "on_exit"]


@pytest.mark.parametrize(
    ("given", "ends"), [({"num_train_epochs": 1.5}, [3]), ({"max_steps": 2}, []), ({"num_train_epochs": 2}, [3, 6])]
)
def test_an_epoch_that_a_run_leaves_early_does_not_end(tmp_path: Path, given: dict[str, Any], ends: list[int]) -> None:
    found: list[int] = []

    class Ends(Callback):
        def on_epoch_end(self, run: Run) -> None:
            found.append(run.state.step)

    Trainer(Linear(), arguments(tmp_path, **{"max_steps": -1, **given}), points(), callbacks=[Ends()]).train()
    assert found == ends


@pytest.mark.parametrize("strategy", ["steps", "epoch"])
def test_a_rollback_of_the_last_step_leaves_a_last_record_and_evaluation(tmp_path: Path, strategy: str) -> None:
    """Without the samples of the bad step, training ends where it went back to."""
    found: list[tuple[str, int]] = []
    due: list[bool] = []

    class Watch(Callback):
        def on_pre_optimizer_step(self, run: Run) -> None:
            if run.state.step == 4 and not run.state.rollbacks:
                next(run.model.parameters()).grad.fill_(float("nan"))

        def on_log(self, run: Run, record: dict[str, Any]) -> None:
            found.append(("log", run.state.step))

        def on_evaluate(self, run: Run, metrics: dict[str, Any]) -> None:
            found.append(("evaluate", run.state.step))

        def on_epoch_end(self, run: Run) -> None:
            due.append(run.requests.evaluate)

    args = arguments(
        tmp_path, max_steps=-1, num_train_epochs=1, nonfinite="rollback", save_strategy="steps", save_steps=1,
        logging_strategy=strategy, eval_strategy=strategy, logging_steps=3, eval_steps=3, per_device_train_batch_size=4,
    )  # fmt: skip
    trainer = Trainer(Linear(), args, points(), points(4), callbacks=[Watch()])
    trainer.train()
    assert (trainer.run.state.step, trainer.run.state.rollbacks) == (4, 1)
    assert found[-2:] == [("log", 4), ("evaluate", 4)]
    assert due[-1]


@pytest.mark.parametrize("leaves", [False, True])
def test_the_end_of_training_has_its_figures_unless_a_signal_ends_it(tmp_path: Path, leaves: bool) -> None:
    found: list[dict[str, Any] | None] = []

    class End(Callback):
        def on_step_end(self, run: Run) -> None:
            if leaves:
                run.requests.exit_code = 143

        def on_log(self, run: Run, record: dict[str, Any]) -> None:
            assert "train_loss" not in record

        def on_train_end(self, run: Run, metrics: dict[str, Any] | None) -> None:
            if metrics is not None:
                metrics["mine"] = torch.tensor(2.5)
            found.append(metrics)

    trainer = Trainer(Linear(), arguments(tmp_path, logging_steps=1), points(), callbacks=[End()])
    if leaves:
        with pytest.raises(SystemExit):
            trainer.train()
        assert found == [None]
    else:
        result = trainer.train()
        assert found == [result.metrics]
        assert result.metrics["mine"] == 2.5
        assert result.metrics["train_loss"] == result.training_loss


def test_best_model_is_loaded_at_the_end(tmp_path: Path) -> None:
    losses = []

    class Watch(Callback):
        def on_evaluate(self, run: Run, metrics: dict[str, Any]) -> None:
            losses.append(metrics["eval_loss"])

    args = arguments(
        tmp_path, max_steps=12, learning_rate=0.9, eval_strategy="steps", eval_steps=1, save_strategy="steps",
        save_steps=100, load_best_model_at_end=True, save_total_limit=1,
    )  # fmt: skip
    torch.manual_seed(0)
    trainer = Trainer(Linear(), args, points(), points(7), callbacks=[Watch()])
    trainer.train()
    assert len(set(losses)) > 1
    assert losses[-1] != min(losses)
    assert trainer.evaluate()["eval_loss"] == min(losses)
    assert trainer.run.state.best_metric == min(losses[:12])


@pytest.mark.parametrize(("epochs", "steps"), [(0.5, 2), (1.0, 3), (1.5, 5), (2.0, 6)])
def test_epochs_may_be_fractions(tmp_path: Path, epochs: float, steps: int) -> None:
    args = arguments(tmp_path, max_steps=-1, num_train_epochs=epochs)
    assert Trainer(Linear(), args, points()).train().global_step == steps


def test_a_run_that_was_told_to_leave_can_still_be_evaluated(tmp_path: Path) -> None:
    class Leave(Callback):
        def on_step_end(self, run: Run) -> None:
            run.requests.stop, run.requests.exit_code = True, 130

    trainer = Trainer(Linear(), arguments(tmp_path), points(), points(5), callbacks=[Leave()])
    with pytest.raises(SystemExit) as left:
        trainer.train()
    assert left.value.code == 130
    assert "eval_loss" in trainer.evaluate()


@pytest.mark.parametrize("length", [{"max_steps": 3}, {"max_steps": -1, "num_train_epochs": 1.5}])
def test_the_part_of_an_epoch_at_the_end_is_evaluated(tmp_path: Path, length: dict[str, Any]) -> None:
    evaluated = []

    class Recorder(Callback):
        def on_evaluate(self, run: Run, metrics: dict[str, Any]) -> None:
            evaluated.append(run.state.step)

    args = arguments(tmp_path, per_device_train_batch_size=5, eval_strategy="epoch", **length)
    result = Trainer(Linear(), args, points(), points(5), callbacks=[Recorder()]).train()
    assert evaluated[-1] == result.global_step
    assert len(set(evaluated)) == len(evaluated)


def test_a_metric_without_a_prefix(tmp_path: Path) -> None:
    assert "loss" in Trainer(Linear(), arguments(tmp_path), eval_dataset=points()).evaluate(metric_key_prefix="")


class Steps(Callback):
    """Keeps the steps of the evaluations, and leaves at the first one if asked to."""

    def __init__(self, leaves: bool = False) -> None:
        self.steps: list[int] = []
        self.leaves = leaves

    def on_evaluate(self, run: Run, metrics: dict[str, Any]) -> None:
        self.steps.append(run.state.step)
        if self.leaves:
            run.requests.exit_code = 143
            run.requests.save = run.requests.stop = True


def test_a_resume_from_the_start_does_not_evaluate_again(tmp_path: Path) -> None:
    args = arguments(tmp_path, eval_on_start=True, save_strategy="steps", save_steps=2)
    first, second = Steps(leaves=True), Steps()
    with pytest.raises(SystemExit):
        Trainer(Linear(), args, points(), points(4), callbacks=[first]).train()
    assert first.steps == [0]
    assert (tmp_path / "run" / "checkpoint-0").is_dir()
    Trainer(Linear(), args, points(), points(4), callbacks=[second]).train(resume_from_checkpoint=True)
    assert second.steps == []


@pytest.mark.parametrize(
    ("changes", "setting"),
    [({"eval_on_start": True}, "eval_on_start=True"), ({"eval_strategy": "epoch"}, "eval_strat")],
)
def test_evaluations_without_a_dataset_are_warned_of(tmp_path: Path, changes: dict[str, Any], setting: str) -> None:
    with pytest.warns(UserWarning, match=f"{setting}.* has no effect without eval_dataset"):
        Trainer(Linear(), arguments(tmp_path, **changes), points())


class Lazy(Linear):
    """Creates a parameter in its first forward pass, or has it created."""

    def create(self) -> None:
        self.register_parameter("late", torch.nn.Parameter(torch.ones(())))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "late"):
            self.create()
        return super().forward(x, labels) + 0 * self.late


def test_a_parameter_that_nothing_would_train_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^the parameter 'late' of this Lazy appeared after the optimizer was made"):
        Trainer(Lazy(), arguments(tmp_path, max_steps=2), points()).train()


@pytest.mark.parametrize("how", ["before", "by a callback", "frozen"])
def test_a_parameter_that_is_trained_or_frozen_may_come_late(tmp_path: Path, how: str) -> None:
    class Adds(Callback):
        def on_train_begin(self, run: Run) -> None:
            assert isinstance(run.model, Lazy)
            run.model.create()
            if how == "frozen":
                run.model.late.requires_grad_(False)
            else:
                run.optimizer.param_groups[0]["params"].append(run.model.late)

    model = Lazy()
    if how == "before":
        model.create()
    callbacks = [] if how == "before" else [Adds()]
    args = arguments(tmp_path, max_steps=2, lr_scheduler_type="constant", save_strategy="no")
    assert Trainer(model, args, points(), callbacks=callbacks).train().global_step == 2
