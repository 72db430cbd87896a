"""A model that runs out of memory, and its trainings."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import IterableDataset

from trainer_kit import Callback, Run, Strategy, Trainer, TrainingArguments
from trainer_kit.profiling.time_ledger import HostClock
from trainer_kit.strategies.device_info import DeviceInfo

ASKED = {"per_device_train_batch_size": 16, "auto_find_batch_size": True}
GIVEN = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4}


class Hungry(torch.nn.Module):
    """Runs out of memory with more samples than `room`, in the forward or the backward pass."""

    def __init__(self, room: int, when: str = "forward") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.room = room
        self.when = when
        self.refused = 0
        self.layers = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Dropout(0.2))
        self.head = torch.nn.Linear(4, 1)
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("mask", torch.ones(1, 3).expand(2, 3), persistent=False)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        self.mean = 0.9 * self.mean + 0.1 * (x.detach() * self.mask[0]).mean(0)  # another tensor each time
        hidden = self.layers(x) if self.room else x.new_zeros(len(x), 4)  # a batch norm wants two samples
        if self.training and len(x) > self.room and type(x) is torch.Tensor:  # not while it is estimated
            if self.when == "forward":
                self.refuse()
            hidden.register_hook(self.refuse)
        return {"loss": (self.head(hidden)[:, 0] - labels).square().mean()}

    def refuse(self, _: Any = None) -> None:
        self.refused += 1
        raise torch.OutOfMemoryError("out of memory")


def samples() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [{"x": torch.randn(3, generator=generator), "labels": torch.tensor(1.0)} for _ in range(48)]


class Stream(IterableDataset[Any]):
    """An iterable dataset without a state."""

    def __iter__(self) -> Iterator[Any]:
        yield from samples()


class Stateful(Stream):
    """One that goes on where it stands."""

    def __init__(self) -> None:
        self.place = 0

    def __iter__(self) -> Iterator[Any]:
        rows = samples()
        while self.place < len(rows):
            self.place += 1
            yield rows[self.place - 1]
        self.place = 0

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place = state["place"]


class Tighten(Callback):
    """Takes room away after a step."""

    def __init__(self, step: int, room: int) -> None:
        self.step, self.room = step, room

    def on_step_end(self, run: Run) -> None:
        if run.state.step == self.step:
            run.model.room = self.room


def make(
    folder: Path, room: int, *callbacks: Callback, when: str = "forward", data: Any = None, strategy: Any = None,
    model: torch.nn.Module | None = None, **arguments: Any,
) -> Trainer:  # fmt: skip
    args = TrainingArguments(
        str(folder), learning_rate=0.1, report_to="none", disable_tqdm=True, use_cpu=True,
        **{"num_train_epochs": 1, **arguments},
    )  # fmt: skip
    dataset = samples() if data is None else data
    return Trainer(model or Hungry(room, when), args, dataset, callbacks=callbacks, strategy=strategy or Strategy())


class OwnTime(Strategy):
    """Its clock goes on where a test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.device_info = OwnTimeInfo(self)


class OwnTimeInfo(DeviceInfo):
    def __init__(self, strategy: OwnTime) -> None:
        super().__init__(strategy.device)
        self.strategy = strategy

    def clock(self) -> Any:
        clock = HostClock()
        clock.mark = lambda: self.strategy.now  # type: ignore[method-assign]
        return clock


def trained(folder: Path, room: int, *callbacks: Callback, **options: Any) -> Trainer:
    trainer = make(folder, room, *callbacks, **options)
    trainer.train()
    return trainer


def are_equal(one: Trainer, other: Trainer) -> bool:
    first, second = one.run.model.state_dict(), other.run.model.state_dict()
    assert one.run.state.step == other.run.state.step
    return all(torch.equal(first[name], second[name]) for name in second)
