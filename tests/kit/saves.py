"""What tests of saving look at."""

from __future__ import annotations

from pathlib import Path

import torch

from trainer_kit import Callback, Run
from trainer_kit.checkpoint import find_checkpoints, verify


class Watch(Callback):
    """Keeps the weights of every step, and at which step which checkpoint was announced."""

    priority = 1000

    def __init__(self) -> None:
        self.weights: dict[int, dict[str, torch.Tensor]] = {}
        self.saved: list[tuple[str, int]] = []

    def on_step_end(self, run: Run) -> None:
        self.weights[run.state.step] = {name: value.clone() for name, value in run.model.state_dict().items()}

    def on_save(self, run: Run, directory: Path) -> None:
        verify(directory)
        self.saved.append((directory.name, run.state.step))


def names(folder: Path) -> list[str]:
    return [path.name for path in find_checkpoints(folder)]


class SaveFirst(Callback):
    """Asks for a checkpoint at the start."""

    def on_train_begin(self, run: Run) -> None:
        run.requests.save = True
