"""Calls of functions in a step, which need no clock: those of a loop written by hand, times a bound."""

from __future__ import annotations

import cProfile
import itertools
import os
import pstats
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from trainer_kit import Trainer, TrainingArguments
from trainer_kit.loop.training_loop import TrainingLoop

BOUND = 0.95
MOST = 495
"""Calls in a step today. A change that adds some raises it knowingly, one that saves some lowers it."""

FEW, MORE, LOGGING_STEPS = 100, 300, 50


class Points(Dataset[Any]):
    """Points in 16 dimensions."""

    def __len__(self) -> int:
        return 4000

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": torch.full((16,), float(index)), "labels": torch.tensor(index % 2)}


class Net(torch.nn.Module):
    """Two layers; returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 2))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.layers(x)
        return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}


def calls(run: Callable[[int, cProfile.Profile], None]) -> float:
    """Calls in a step, without those of the first ones."""
    counts = []
    for steps in (FEW, MORE):
        profile = cProfile.Profile()
        run(steps, profile)
        counts.append(sum(values[1] for values in pstats.Stats(profile).stats.values()))  # type: ignore[attr-defined]
    return (counts[1] - counts[0]) / (MORE - FEW)


def by_hand(steps: int, profile: cProfile.Profile) -> None:
    """A loop that clips, follows a linear schedule and reads the loss at each record."""
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / steps))
    total, losses = torch.zeros(()), []
    loader = DataLoader(Points(), batch_size=8, shuffle=True)
    with profile:
        for step, batch in enumerate(itertools.islice(loader, steps), start=1):
            loss = model(**batch)["loss"]
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            total += loss.detach()
            if step % LOGGING_STEPS == 0:
                losses.append(total.item() / LOGGING_STEPS)
                total.zero_()


def by_trainer(steps: int, profile: cProfile.Profile) -> None:
    """The Trainer with all defaults."""

    def profiled(loop: TrainingLoop) -> None:
        with profile:
            take_steps(loop)

    take_steps = TrainingLoop.take_steps
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        patch.setattr(TrainingLoop, "take_steps", profiled)
        args = TrainingArguments(
            folder, max_steps=steps, logging_steps=LOGGING_STEPS, use_cpu=True, save_strategy="no", disable_tqdm=True,
            log_level="error",
        )  # fmt: skip
        Trainer(Net(), args, Points()).train()


@pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="counts of another release of torch differ")
def test_a_step_makes_fewer_calls_than_a_loop_by_hand() -> None:
    """What a feature costs in a step that does not use it must be made up for elsewhere."""
    for each in (by_hand, by_trainer):
        each(1, cProfile.Profile())  # imports what is imported late
    assert calls(by_trainer) <= BOUND * calls(by_hand)


@pytest.mark.slow
@pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="counts of another release of torch differ")
@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="counts of another Python differ")
def test_a_step_makes_no_more_calls_than_before() -> None:
    """In a process of its own, since what other tests import and register is called too."""
    command = [sys.executable, __file__]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True, env=env)
    assert float(done.stdout) <= MOST


if __name__ == "__main__":
    by_trainer(1, cProfile.Profile())
    print(min(calls(by_trainer) for _ in range(2)))  # on a busy machine what depends on time adds some
