"""`auto_find_batch_size`: smaller micro-batches where memory does not suffice, with the same samples a step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from trainer_kit import Strategy, Trainer, TrainingArguments
from trainer_kit.data.order import Layout


class Hungry(torch.nn.Module):
    """Runs out of memory with more samples than `room`."""

    def __init__(self, room: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.room = room
        self.layers = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Dropout(0.2))
        self.head = torch.nn.Linear(4, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.layers(x) if self.room else x.new_zeros(len(x), 4)  # a batch norm wants two samples
        if self.training and len(x) > self.room and type(x) is torch.Tensor:  # not while it is estimated
            raise torch.OutOfMemoryError("out of memory")
        return {"loss": (self.head(hidden)[:, 0] - labels).square().mean()}


def trained(folder: Path, room: int, **arguments: Any) -> Trainer:
    generator = torch.Generator().manual_seed(0)
    data = [{"x": torch.randn(3, generator=generator), "labels": torch.tensor(1.0)} for _ in range(48)]
    args = TrainingArguments(
        str(folder), learning_rate=0.1, report_to="none", disable_tqdm=True, **{"num_train_epochs": 1, **arguments}
    )
    trainer = Trainer(Hungry(room), args, data, strategy=Strategy())
    trainer.train()
    return trainer


def test_the_bits_are_those_of_the_layout_that_is_found(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    asked = {"per_device_train_batch_size": 16, "auto_find_batch_size": True}
    found = trained(tmp_path / "found", room=4, **asked)
    given = trained(tmp_path / "given", room=4, per_device_train_batch_size=4, gradient_accumulation_steps=4)
    assert found.run.state.micro_batch == 4
    assert found.run.state.step == given.run.state.step == 3
    pairs = zip(found.run.model.state_dict().values(), given.run.model.state_dict().values(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


def test_without_it_the_error_is_the_users(tmp_path: Path) -> None:
    with pytest.raises(torch.OutOfMemoryError):
        trained(tmp_path, room=4, per_device_train_batch_size=16)


def test_one_sample_that_does_not_fit_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(MemoryError, match="not even one sample"):
        trained(tmp_path, room=0, per_device_train_batch_size=2, auto_find_batch_size=True)


@pytest.mark.parametrize(
    ("layout", "limit", "divided"),
    [((8, 1), 4, (4, 2)), ((24, 2), 16, (16, 3)), ((7, 1), 3, (1, 7)), ((8, 3), 100, (8, 3))],
)
def test_a_step_keeps_its_samples(layout: tuple[int, int], limit: int, divided: tuple[int, int]) -> None:
    assert Layout(*layout).divided(limit) == Layout(*divided)
