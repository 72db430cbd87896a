"""What a training begins with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from kit.datasets import points
from kit.models import Linear
from kit.trainer import arguments

from trainer_kit import (
    Trainer,
    load_checkpoint_in_model,
)


def test_eval_strategy_without_a_set_is_a_warning(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="eval_strategy='steps' has no effect without eval_dataset"):
        trainer = Trainer(Linear(), arguments(tmp_path, eval_strategy="steps", eval_steps=1), points())
    assert trainer.train().global_step == 4


@pytest.mark.parametrize("as_function", [True, False])
def test_own_optimizer_and_scheduler(tmp_path: Path, as_function: bool) -> None:
    model = Linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)

    def make(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)

    scheduler = make if as_function else make(optimizer)
    trainer = Trainer(model, arguments(tmp_path), points(), optimizer=optimizer, lr_scheduler=scheduler)
    trainer.train()
    assert trainer.run.optimizer is optimizer
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.5 * 0.5**4)


def test_scheduler_of_another_optimizer_is_refused(tmp_path: Path) -> None:
    other = torch.optim.SGD(Linear().parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(other, 1)
    with pytest.raises(ValueError, match="belongs to another optimizer"):
        Trainer(Linear(), arguments(tmp_path), points(), lr_scheduler=scheduler)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_torch_compile_trains_and_saves_plain_names(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Linear()
    trainer = Trainer(model, arguments(tmp_path, torch_compile=True), points())
    compiled = trainer.train().training_loss
    torch.manual_seed(0)
    plain = Trainer(Linear(), arguments(tmp_path), points()).train().training_loss
    assert compiled == pytest.approx(plain, abs=1e-5)
    trainer.save_model(tmp_path / "model")
    load_checkpoint_in_model(Linear(), tmp_path / "model")


def test_training_again_with_a_schedule_that_ran_its_course_is_refused(tmp_path: Path) -> None:
    model = Linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.5, total_steps=6)
    trainer = Trainer(model, arguments(tmp_path), points(), optimizer=optimizer, lr_scheduler=scheduler)
    trainer.train()
    with pytest.raises(ValueError, match="lr_scheduler has run its course"):
        trainer.train()
