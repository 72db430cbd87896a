"""What `compute_loss` uses outside of the model is warned of where a training would lose it."""

from __future__ import annotations

import contextlib
import functools
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.trainer import arguments
from torch import nn

from trainer_kit import Callback, Trainer
from trainer_kit.loss.outside_modules import outside_modules

FORGOTTEN = "compute_loss computes gradients for weights of Criterion, which the optimizer does not have"
UNSAVED = "the optimizer has parameters that are not the model's (1), which no checkpoint holds"


class Criterion(nn.Module):
    """A loss with a weight, and with a memory of the last batch."""

    memory: torch.Tensor
    cache: torch.Tensor

    def __init__(self, learns: bool = True, remembers: bool = False) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3), requires_grad=learns)
        self.register_buffer("memory", torch.zeros(3))
        self.register_buffer("cache", torch.zeros(3), persistent=False)
        self.remembers = remembers

    def forward(self, output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        self.cache.copy_(output.detach()[0])
        if self.remembers:
            self.memory.copy_(output.detach()[0])
        return nn.functional.cross_entropy(output * self.scale + self.memory, labels)


def samples() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [{"x": torch.randn(4, generator=generator), "labels": torch.tensor(place % 3)} for place in range(8)]


def warned(folder: Path, compute_loss: Any, model: nn.Module | None = None, given: Any = None, **changes: Any) -> Any:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        args = arguments(folder, **{"max_steps": 2, "save_strategy": "epoch", **changes})
        trainer = Trainer(model or nn.Linear(4, 3), args, samples(), compute_loss=compute_loss, optimizer=given)
        trainer.train()
    return [str(each.message) for each in caught]


def by_closure(criterion: Criterion) -> Callable[..., Any]:
    return lambda model, batch: criterion(model(batch["x"]), batch["labels"])


def by_partial(criterion: Criterion) -> Callable[..., Any]:
    def compute(model: nn.Module, batch: Any, *, parts: dict[str, Any]) -> Any:
        return parts["criterion"](model(batch["x"]), batch["labels"])

    return functools.partial(compute, parts={"criterion": criterion})


class Task:
    def __init__(self, criterion: Criterion) -> None:
        self.criterion = criterion

    def compute(self, model: nn.Module, batch: Any) -> Any:
        return self.criterion(model(batch["x"]), batch["labels"])

    def __call__(self, model: nn.Module, batch: Any) -> Any:
        return self.compute(model, batch)


CRITERION = Criterion()


def by_global(model: nn.Module, batch: Any) -> Any:
    return CRITERION(model(batch["x"]), batch["labels"])


@pytest.mark.parametrize(
    "make", [by_closure, by_partial, lambda each: Task(each).compute, lambda each: Task(each), lambda each: by_global]
)
def test_weights_that_nothing_trains_are_a_warning(tmp_path: Path, make: Callable[[Criterion], Any]) -> None:
    (message,) = warned(tmp_path, make(Criterion()))
    assert message.startswith(FORGOTTEN)


def test_a_part_of_what_also_holds_the_model_is_found(tmp_path: Path) -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.criterion = nn.Linear(4, 3), Criterion()

        def compute(self, model: nn.Module, batch: Any) -> Any:
            return self.criterion(model(batch["x"]), batch["labels"])

    both = Both()
    (message,) = warned(tmp_path, both.compute, both.net)
    assert message.startswith(FORGOTTEN)
    assert (
        warned(tmp_path / "whole", lambda model, batch: both.criterion(both.net(batch["x"]), batch["labels"]), both)
        == []
    )


def test_weights_that_nothing_saves_are_a_warning(tmp_path: Path) -> None:
    model, criterion = nn.Linear(4, 3), Criterion()
    optimizer = torch.optim.SGD([*model.parameters(), *criterion.parameters()], lr=0.1)
    (message,) = warned(tmp_path, by_closure(criterion), model, optimizer)
    assert message.startswith(UNSAVED)
    assert warned(tmp_path / "no", by_closure(criterion), model, optimizer, save_strategy="no") == []


def test_what_is_in_stateful_is_saved(tmp_path: Path) -> None:
    model, criterion = nn.Linear(4, 3), Criterion(remembers=True)
    optimizer = torch.optim.SGD([*model.parameters(), *criterion.parameters()], lr=0.1)
    args = arguments(tmp_path, max_steps=2, save_strategy="epoch")
    trainer = Trainer(model, args, samples(), compute_loss=by_closure(criterion), optimizer=optimizer)
    trainer.run.stateful["criterion"] = criterion
    trainer.train()


@pytest.mark.parametrize("teaches", [False, True])
def test_a_teacher_and_a_frozen_loss_are_fine(tmp_path: Path, teaches: bool) -> None:
    criterion, teacher = Criterion(learns=False), nn.Linear(4, 3)

    def compute(model: nn.Module, batch: Any) -> Any:
        with torch.no_grad():
            target = teacher(batch["x"])
        return criterion(model(batch["x"]), batch["labels"]) + teaches * (model(batch["x"]) - target).square().mean()

    assert warned(tmp_path, compute) == []


def test_a_teacher_that_was_trained_before_is_fine(tmp_path: Path) -> None:
    teacher = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3).eval())
    teacher(torch.ones(2, 4)).sum().backward()

    def compute(model: nn.Module, batch: Any) -> Any:
        with torch.no_grad():
            target = teacher.to(torch.float64)(batch["x"].double()).float()
        return (model(batch["x"]) - target).square().mean()

    assert warned(tmp_path, compute) == []


def test_what_a_callback_or_an_object_saves_is_fine(tmp_path: Path) -> None:
    model, criterion = nn.Linear(4, 3), Criterion(remembers=True)
    optimizer = torch.optim.SGD([*model.parameters(), *criterion.parameters()], lr=0.1)

    class Keeper(Callback):
        def state_dict(self) -> dict[str, Any]:
            return {"criterion": criterion.state_dict()}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            criterion.load_state_dict(state["criterion"])

    args = arguments(tmp_path, max_steps=2, save_strategy="epoch")
    compute = by_closure(criterion)
    Trainer(model, args, samples(), compute_loss=compute, optimizer=optimizer, callbacks=[Keeper()]).train()


def adversarial(momentum: float) -> tuple[Any, torch.optim.Optimizer]:
    """A loss with a discriminator, and the optimizer with which it trains that."""
    critic = nn.Linear(3, 1)
    own = torch.optim.SGD(critic.parameters(), lr=0.1, momentum=momentum)

    def compute(model: nn.Module, batch: Any) -> Any:
        output = model(batch["x"])
        own.zero_grad()
        critic(output.detach()).mean().backward()
        own.step()
        return -critic(output).mean()

    return compute, own


def test_a_discriminator_with_an_optimizer_of_its_own_is_fine(tmp_path: Path) -> None:
    compute, _ = adversarial(momentum=0)
    assert warned(tmp_path, compute) == []


@pytest.mark.parametrize("is_kept", [False, True])
def test_an_optimizer_of_compute_loss_whose_state_nothing_saves_is_a_warning(tmp_path: Path, is_kept: bool) -> None:
    compute, own = adversarial(momentum=0.9)
    args = arguments(tmp_path, max_steps=2, save_strategy="epoch")
    trainer = Trainer(nn.Linear(4, 3), args, samples(), compute_loss=compute)
    if is_kept:
        trainer.run.stateful["critic"] = own
    expected = r"compute_loss holds an optimizer \(SGD\) whose state no checkpoint holds"
    with contextlib.nullcontext() if is_kept else pytest.warns(UserWarning, match=expected):
        trainer.train()


def test_a_loss_that_knows_the_optimizer_of_the_run_is_fine(tmp_path: Path) -> None:
    model = nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    def compute(model: nn.Module, batch: Any) -> Any:
        return model(batch["x"]).square().mean() * optimizer.param_groups[0]["lr"]

    assert warned(tmp_path, compute, model, optimizer) == []


def test_objects_that_cannot_be_looked_at_are_left_alone(tmp_path: Path) -> None:
    class Hidden:
        @property
        def __dict__(self) -> Any:  # type: ignore[override]
            raise RuntimeError("not for you")

    lazy, model = nn.LazyBatchNorm1d(), nn.Linear(4, 3)
    proxy, dead, hidden = weakref.proxy(model), weakref.proxy(Criterion()), Hidden()

    def compute(model: nn.Module, batch: Any, others: Any = (proxy, lazy)) -> Any:
        return model(batch["x"]).square().mean() + 0 * len((dead, hidden))

    assert warned(tmp_path, compute, model) == []


def test_the_search_ends() -> None:
    names = {f"f{number}": None for number in range(60)}
    code = "\n".join(f"def {name}(model, batch): return {', '.join(names)}" for name in names)
    found: dict[str, Any] = {}
    exec(code, found)
    assert outside_modules(found["f0"], nn.Linear(1, 1)) == []


def test_the_modules_outside_of_the_model_come_in_a_fixed_order() -> None:
    model, first, second = nn.Sequential(nn.Linear(1, 1)), Criterion(), nn.Sequential(Criterion())
    assert outside_modules(lambda *given: (first, model, second, model[0]), model) == [first, second]
    assert outside_modules(None, model) == []
