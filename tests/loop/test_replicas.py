"""The warning of weights that differ between the processes."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.datasets import points
from kit.models import Linear
from kit.ranks import on_ranks
from kit.trainer import arguments

from trainer_kit import Callback, Run, Trainer


class SetsItself(Linear):
    """Draws a weight in its first forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = torch.nn.Parameter(torch.zeros(0), requires_grad=False)
        self.scale = torch.nn.Parameter(torch.ones((), dtype=torch.bfloat16))
        self.is_set = False

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if not self.is_set:
            self.is_set = True
            with torch.no_grad():
                self.scale.copy_(torch.rand(()))
        return super().forward(x * self.scale, labels)


class Draws(Callback):
    """Sets a weight to numbers that each process draws."""

    def on_train_begin(self, run: Run) -> None:
        torch.nn.init.normal_(run.model.layer.bias)  # type: ignore[union-attr, arg-type]


def warned(folder: str, kind: str) -> list[str]:
    torch.manual_seed(0)
    model: Any = SetsItself() if kind == "model" else Linear()
    callbacks = [Draws()] if kind == "callback" else []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = Trainer(model, arguments(Path(folder), max_steps=2), points(), callbacks=callbacks)
        torch.manual_seed(trainer.run.strategy.rank)
        trainer.train()
    return [str(each.message) for each in caught if "different weights" in str(each.message)]


@pytest.mark.distributed
@pytest.mark.parametrize(("kind", "names"), [("model", "scale"), ("callback", "layer.bias")])
def test_what_each_process_sets_on_its_own_is_named(kind: str, names: str, tmp_path: Path) -> None:
    (message,), others = on_ranks(2, warned, str(tmp_path), kind)
    assert message.startswith(f"the processes train different weights: {names} differ after two steps")
    assert others == []


@pytest.mark.distributed
def test_equal_weights_are_not_named(tmp_path: Path) -> None:
    assert on_ranks(2, warned, str(tmp_path), "none") == [[], []]
