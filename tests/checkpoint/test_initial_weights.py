"""Weights that a training begins with, on one process; `tests/strategies/fsdp/test_weights.py` has several."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.trainer import arguments
from torch import nn

from trainer_kit import Trainer, TrainingArguments
from trainer_kit.errors import CheckpointError


class Model(nn.Module):
    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.hidden = nn.Linear(2, width)
        self.head = nn.Linear(width, 1)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.head(self.hidden(x)).square().mean()}


def trained(folder: Path, model: nn.Module, weights: Path | None, steps: int = 1) -> Trainer:
    args = TrainingArguments(output_dir=str(folder), max_steps=steps, report_to="none", disable_tqdm=True, use_cpu=True)
    trainer = Trainer(model, args, [{"x": torch.ones(2)}] * 4, weights=weights)
    trainer.train()
    return trainer


def test_training_begins_with_the_weights_of_a_checkpoint(tmp_path: Path) -> None:
    first = trained(tmp_path / "first", Model(), None)
    saved = first.run.model
    second = trained(tmp_path / "second", Model(), tmp_path / "first/checkpoint-1")
    expected = trained(tmp_path / "third", saved, None).run.model
    for ours, theirs in zip(second.run.model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_a_second_training_goes_on_with_the_models_own_weights(tmp_path: Path) -> None:
    Trainer(Model(), TrainingArguments(output_dir=str(tmp_path))).save_model(tmp_path / "saved")
    trainer = trained(tmp_path / "run", Model(), tmp_path / "saved")
    with torch.no_grad():
        trainer.run.model.head.weight.fill_(7)
    trainer.evaluate([{"x": torch.ones(2)}])
    assert (trainer.run.model.head.weight == 7).all()


def test_a_damaged_or_another_folder_is_refused(tmp_path: Path) -> None:
    Trainer(Model(4), TrainingArguments(output_dir=str(tmp_path))).save_model(tmp_path / "wide")
    with pytest.raises(ValueError, match=r"of other shape: 'hidden.weight' is of shape \[4, 2\] there"):
        trained(tmp_path / "run", Model(), tmp_path / "wide")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="empty"):
        trained(tmp_path / "run", Model(), tmp_path / "empty")


def test_a_model_init_that_needs_an_argument_is_refused(tmp_path: Path) -> None:
    def make(trial: Any, *others: Any, width: int = 2, **options: Any) -> torch.nn.Module:
        raise AssertionError("never called")

    with pytest.raises(TypeError, match=r"model_init needs the argument 'trial', but is called without any; let it"):
        Trainer(args=arguments(tmp_path), model_init=make)
    assert Trainer(args=arguments(tmp_path), model_init=functools.partial(torch.nn.Linear, 2, 3)).run.model is not None


def test_a_decorator_may_give_the_arguments(tmp_path: Path) -> None:
    def given(function: Any) -> Any:
        return functools.wraps(function)(lambda: function(3))

    trainer = Trainer(args=arguments(tmp_path), model_init=given(lambda width: torch.nn.Linear(2, width)))
    assert trainer.run.model.out_features == 3
