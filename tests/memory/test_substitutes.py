"""Trial steps leave the modules of `compute_loss` as they are."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.trainer import arguments
from torch import nn

from trainer_kit import Trainer
from trainer_kit.memory import estimate
from trainer_kit.memory.measuring import measure
from trainer_kit.memory.substitutes import Substitutes

MEASURES: list[Callable[..., Any]] = [estimate, measure]


class Queue(nn.Module):
    """A loss with a memory of outputs, which counts in an attribute too."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bank", torch.zeros(8, 4))
        self.register_buffer("place", torch.zeros(1, dtype=torch.long))
        self.center, self.calls = torch.zeros(4), 0
        self.norm = nn.BatchNorm1d(4).requires_grad_(False)

    def forward(self, out: torch.Tensor) -> torch.Tensor:
        place = int(self.place)
        self.bank[place : place + len(out)] = out.detach()
        self.place[0] = (place + len(out)) % len(self.bank)
        self.center = 0.9 * self.center + 0.1 * out.detach().mean(0)
        self.calls += 1
        return (self.norm(out) - self.bank.mean(0) - self.center).square().mean()


def everything(module: nn.Module) -> dict[str, Any]:
    return {f"{path}.{key}": copy.deepcopy(value) for path, part in module.named_modules()
            for kind in (vars(part), part._buffers, part._parameters) for key, value in kind.items()
            if isinstance(value, (torch.Tensor, int))}  # fmt: skip


def check_unchanged(module: nn.Module, before: dict[str, Any]) -> None:
    after = everything(module)
    assert after.keys() == before.keys()
    for key, value in after.items():
        assert type(value) is type(before[key])
        assert torch.equal(value, before[key]) if isinstance(value, torch.Tensor) else value == before[key], key


@pytest.mark.parametrize("function", MEASURES)
def test_a_loss_with_a_memory_stays_as_it_is(function: Callable[..., Any], tmp_path: Path) -> None:
    queue, model = Queue(), nn.Linear(4, 4)
    parts = [queue, queue.norm]

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        assert parts[1] is queue.norm
        return queue(model(batch)) + 0 * parts[1].bias.sum()

    before = everything(queue)
    assert function(model, arguments(tmp_path), torch.randn(8, 4), compute_loss=loss).peak
    check_unchanged(queue, before)


@pytest.mark.parametrize("function", MEASURES)
def test_a_teacher_that_follows_the_model_stays_as_it_is(function: Callable[..., Any], tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    teacher = copy.deepcopy(model).requires_grad_(False)

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        for own, followed in zip(teacher.parameters(), model.parameters(), strict=True):
            own.mul_(0.9).add_(followed.detach(), alpha=0.1)
        return (model(batch) - teacher(batch)).square().mean()

    before = everything(teacher)
    assert function(model, arguments(tmp_path), torch.randn(2, 4), compute_loss=loss).peak
    check_unchanged(teacher, before)


class Holder(nn.Module):
    """Holds the model, and a center of its own."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.register_buffer("center", torch.zeros(4))
        self.scale = nn.Parameter(torch.ones(4), requires_grad=False)

    def loss(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = model(batch)
        self.center = 0.9 * self.center + out.detach().mean(0)
        self.scale.mul_(0.9)
        return ((out - self.center) * self.scale).square().mean()


@pytest.mark.parametrize("function", MEASURES)
def test_what_holds_the_model_stays_as_it_is(function: Callable[..., Any], tmp_path: Path) -> None:
    holder = Holder(nn.Linear(4, 4))
    before = everything(holder)
    assert function(holder.model, arguments(tmp_path), torch.randn(2, 4), compute_loss=holder.loss).peak
    check_unchanged(holder, before)


def test_what_cannot_be_copied_stays_in_place() -> None:
    queue = Queue()
    queue.lock = threading.Lock()  # type: ignore[assignment]
    with Substitutes(lambda model, batch: queue(batch), nn.Linear(4, 4), copy.deepcopy).in_place():
        queue(torch.ones(2, 4))
    assert queue.calls == 1


def test_the_search_for_a_batch_size_changes_no_result(tmp_path: Path) -> None:
    def train(finds: bool) -> tuple[dict[str, Any], dict[str, Any]]:
        torch.manual_seed(0)
        queue, model = Queue(), nn.Linear(4, 4)
        data = [{"x": row} for row in torch.randn(8, 4, generator=torch.Generator().manual_seed(1))]
        args = arguments(tmp_path / str(finds), auto_find_batch_size=finds, per_device_train_batch_size=4)
        Trainer(model, args, data, compute_loss=lambda model, batch: queue(model(batch["x"]))).train()
        return everything(queue), model.state_dict()

    (queue, model), (other_queue, other_model) = train(False), train(True)
    for one, other in ((queue, other_queue), (model, other_model)):
        assert one.keys() == other.keys()
        assert all(torch.equal(torch.as_tensor(one[key]), torch.as_tensor(other[key])) for key in one)


def test_a_plan_changes_nothing(tmp_path: Path) -> None:
    queue = Queue()
    before = everything(queue)
    data = [{"x": row} for row in torch.randn(16, 4)]
    args = arguments(tmp_path, per_device_train_batch_size=4, eval_strategy="epoch", metric_for_best_model="loss")
    Trainer(
        nn.Linear(4, 4), args, data, eval_dataset=data, compute_loss=lambda model, batch: queue(model(batch["x"]))
    ).plan()
    check_unchanged(queue, before)
