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
    """Sets a weight to numbers that each process draws, after the first step."""

    def on_step_end(self, run: Run) -> None:
        if run.state.step == 1:
            own = torch.Generator().manual_seed(run.strategy.rank)
            torch.nn.init.normal_(run.model.layer.bias, generator=own)  # type: ignore[union-attr, arg-type]


def warned(folder: str, kind: str, save_strategy: str) -> list[str]:
    torch.manual_seed(0)
    model: Any = SetsItself() if kind in ("model", "left out") else Linear()
    if kind == "left out":
        model._ddp_params_and_buffers_to_ignore = ["scale"]
    args = arguments(Path(folder), max_steps=3, save_strategy=save_strategy, save_steps=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = Trainer(model, args, points(), callbacks=[Draws()] if kind == "callback" else [])
        torch.manual_seed(trainer.run.strategy.rank)
        trainer.train()
    return [str(each.message) for each in caught if "different weights" in str(each.message)]


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("kind", "saves", "differ"),
    [
        ("model", "steps", "scale differ at step 1,"),
        ("model", "no", "scale differ at step 3,"),
        ("callback", "steps", "layer.bias differ at step 1,"),
    ],
)
def test_what_each_process_sets_on_its_own_is_named(kind: str, saves: str, differ: str, tmp_path: Path) -> None:
    (message,), others = on_ranks(2, warned, str(tmp_path), kind, saves)
    assert message.startswith(f"the processes train different weights: {differ}")
    assert others == []


@pytest.mark.distributed
@pytest.mark.parametrize("kind", ["none", "left out"])
def test_equal_weights_and_those_left_out_are_not_named(kind: str, tmp_path: Path) -> None:
    assert on_ranks(2, warned, str(tmp_path), kind, "steps") == [[], []]
