"""A small Run made by hand, to call hooks on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from trainer_kit.config.arguments import TrainingArguments
from trainer_kit.run import Run
from trainer_kit.strategies.base import Strategy


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., Run]:
    """Makes a Run over 10 steps of 10 samples; keywords are arguments, `model` and `rank`."""

    def make(model: torch.nn.Module | None = None, rank: int = 0, **arguments: Any) -> Run:
        torch.manual_seed(0)
        model = model if model is not None else torch.nn.Linear(4, 2)
        strategy = Strategy()
        strategy.collectives.rank = rank
        strategy.setup()
        args = TrainingArguments(output_dir=str(tmp_path / "out"), **arguments)
        run = Run(args, strategy, model, total_steps=10, total_epochs=args.num_train_epochs)
        run.optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        run.state.epoch_length = 50
        return run

    return make


@pytest.fixture
def take_step() -> Callable[[Run], None]:
    """Counts one step of 10 samples without training anything."""

    def take(run: Run) -> None:
        state = run.state
        state.step += 1
        state.samples += 10
        state.position += 10
        if state.position >= state.epoch_length:
            state.epoch, state.position = state.epoch + 1, 0

    return take
