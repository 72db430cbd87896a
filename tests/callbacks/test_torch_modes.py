"""Modes of torch are on while a run trains, and restored afterwards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from kit.models import Linear
from kit.trainer import arguments

from trainer_kit import Trainer
from trainer_kit.callback import Callback
from trainer_kit.callbacks import DetectAnomaly, Deterministic
from trainer_kit.run import Run


class Modes(Callback):
    """Keeps the modes of each step."""

    def __init__(self, fails: bool = False) -> None:
        self.fails = fails
        self.seen: list[tuple[bool, bool]] = []

    def on_step_end(self, run: Run) -> None:
        self.seen.append(modes())
        if self.fails:
            raise RuntimeError("stop")


def modes() -> tuple[bool, bool]:
    return torch.are_deterministic_algorithms_enabled(), torch.is_anomaly_enabled()


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
@pytest.mark.parametrize(("make", "expected"), [(Deterministic, (True, False)), (DetectAnomaly, (False, True))])
def test_a_mode_is_on_in_training_alone(tmp_path: Path, make: Any, expected: tuple[bool, bool], fails: bool) -> None:
    dataset = [{"x": torch.ones(4), "labels": torch.tensor(1)}] * 2
    recorder = Modes(fails)
    trainer = Trainer(Linear(), arguments(tmp_path, max_steps=1), dataset, callbacks=[make(), recorder])
    if fails:
        with pytest.raises(Exception, match="stop"):
            trainer.train()
    else:
        trainer.train()
    assert recorder.seen == [expected]
    assert modes() == (False, False)


def test_anomaly_detection_names_the_operation(tmp_path: Path) -> None:
    def loss(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        weight = next(model.parameters())
        return (weight * 0).sqrt().sum() * 0

    dataset = [{"x": torch.ones(4), "labels": torch.tensor(1)}] * 2
    args = arguments(tmp_path, max_steps=1, nonfinite="ignore")
    trainer = Trainer(Linear(), args, dataset, compute_loss=loss, callbacks=[DetectAnomaly()])
    with pytest.raises(RuntimeError, match="SqrtBackward0"), pytest.warns(UserWarning, match="Anomaly|Error detected"):
        trainer.train()
