"""A step that begins again with smaller batches."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.hungry import (
    ASKED,
    Hungry,
    OwnTime,
    Tighten,
    are_equal,
    make,
    trained,
)
from kit.ranks import on_ranks
from scenarios.task import StopAt

from trainer_kit import Strategy
from trainer_kit.strategies.ddp import DDP


@pytest.mark.slow
def test_buffers_are_those_of_the_steps_beginning(tmp_path: Path) -> None:
    """Also after steps that fitted, in which torch does not count what a batch norm changes."""
    found = trained(tmp_path / "found", 16, Tighten(2, 8), max_steps=3, **ASKED)
    trained(tmp_path / "resumed", 16, StopAt(2), max_steps=3, **ASKED)
    resumed = make(tmp_path / "resumed", 8, max_steps=3, **ASKED)
    resumed.train(resume_from_checkpoint=True)
    assert found.run.model.refused == resumed.run.model.refused == 1
    assert are_equal(found, resumed)


@pytest.mark.slow
def test_a_step_in_the_middle_begins_anew(tmp_path: Path) -> None:
    """What was done stays: two steps with 16 samples at once, all others with 4."""
    arguments = {**ASKED, "num_train_epochs": 2, "gradient_accumulation_steps": 1}
    trainer = trained(tmp_path, 16, Tighten(2, 4), **arguments)
    assert (trainer.run.state.step, trainer.run.state.samples, trainer.run.state.micro_batch) == (6, 96, 4)


class Tray(DDP):
    """A device that has no room to take more than 4 samples to, on rank 1."""

    def to_device(self, batch: Any) -> Any:
        if self.rank == 1 and len(batch["x"]) > 4:
            raise torch.OutOfMemoryError("no room")
        return super().to_device(batch)

    def prepare_loader(self, micro_batches: Iterator[Any]) -> Iterator[Any]:
        for micro in micro_batches:
            micro.batch = self.to_device(micro.batch)
            yield micro


class Sender(Tray):
    """The same, where batches are brought to the device in the step."""

    prepare_loader = DDP.prepare_loader


def carried_on_two(folder: str, strategy: type[DDP]) -> tuple[int | None, int]:
    trainer = trained(Path(folder), 100, strategy=strategy(), num_train_epochs=2, **ASKED)
    return trainer.run.state.micro_batch, trainer.run.state.step


@pytest.mark.distributed
@pytest.mark.parametrize("strategy", [Tray, Sender])
def test_a_batch_that_cannot_be_brought_to_the_device_is_cut_too(tmp_path: Path, strategy: type[DDP]) -> None:
    assert on_ranks(2, carried_on_two, str(tmp_path), strategy) == [(4, 4), (4, 4)]


class Bare(Strategy):
    """A device to which nothing can be brought once a step is done."""

    def prepare_loader(self, micro_batches: Iterator[Any]) -> Iterator[Any]:
        for micro in micro_batches:
            if micro.global_batch.start:
                raise torch.OutOfMemoryError("no room")
            yield micro


@pytest.mark.slow
def test_what_is_due_is_done_before_an_error_of_the_next_step(tmp_path: Path) -> None:
    with pytest.raises(MemoryError, match="at step 2"):
        trained(tmp_path, 16, strategy=Bare(), save_steps=1, **ASKED)
    assert (tmp_path / "checkpoint-1").is_dir()


class Ticking(Hungry):
    """Takes a second for each forward pass in training, and more memory from one of them on."""

    def __init__(self, strategy: OwnTime, *wanted: Any) -> None:
        super().__init__(*wanted)
        self.strategy = strategy
        self.passes = 0

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        if type(x) is torch.Tensor:
            self.strategy.now += 1
            self.passes += 1
            self.room = 4 if self.passes < 9 else 3
        return super().forward(x, labels)


@pytest.mark.slow
@pytest.mark.parametrize("when", ["forward", "backward"])
def test_what_a_step_that_begins_anew_took_is_lost(tmp_path: Path, when: str) -> None:
    strategy = OwnTime()
    trainer = trained(tmp_path, 0, model=Ticking(strategy, 4, when), strategy=strategy, **ASKED)
    seconds = trainer.run.ledger.seconds()
    # 16 and 8 samples do not fit, then 4 parts do; in the second step the third does not, and the two before are lost.
    assert (seconds["forward"], seconds["lost"]) == (4 + 6 + 6, 1 + 1 + 3)
