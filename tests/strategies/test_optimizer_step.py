"""A step is taken as torch takes it, with or without what torch puts around it."""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.optim import Optimizer, lr_scheduler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from trainer_kit import SingleDevice
from trainer_kit.strategies import optimizer_step
from trainer_kit.strategies.optimizer_step import explain_failure, take_step

MAKERS: dict[str, Callable[[Any], Optimizer]] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, fused=False),
    "adamw fused": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, fused=True),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=0.1),
    "rprop": lambda parameters: torch.optim.Rprop(parameters, lr=0.1),
}


def made(name: str = "sgd") -> tuple[list[nn.Parameter], Optimizer]:
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.randn(3, 2)), nn.Parameter(torch.randn(4))]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    return parameters, MAKERS[name](parameters)


@pytest.fixture
def scopes() -> Iterator[list[str]]:
    """Names of the profiler's scopes that are opened."""
    opened: list[str] = []
    real = torch.autograd.profiler.record_function

    def record(name: str, *rest: Any) -> Any:
        opened.append(name)
        return real(name, *rest)

    with mock.patch.object(torch.autograd.profiler, "record_function", record):
        yield opened


@pytest.mark.parametrize("follows", [False, True])
@pytest.mark.parametrize("name", MAKERS)
def test_no_scope_is_opened_and_no_bit_changes(name: str, follows: bool, scopes: list[str]) -> None:
    (ours, one), (theirs, other) = made(name), made(name)
    schedules = [lr_scheduler.StepLR(each, 2) for each in (one, other)] if follows else []
    for _ in range(4):
        take_step(one)
        assert not scopes
        other.step()
        assert scopes.pop() == f"Optimizer.step#{type(other).__name__}.step"
        for each in schedules:
            each.step()  # warns if no step precedes its own
    assert all(torch.equal(*pair) for pair in zip(ours, theirs, strict=True))
    states = [each.state_dict()["state"] for each in (one, other)]
    assert repr(states[0]) == repr(states[1])


class Looks(torch.optim.SGD):
    """Notes whether gradients are computed in its step, which may raise an error."""

    seen: list[bool]

    def _init_group(self, *args: Any) -> Any:
        self.seen.append(torch.is_grad_enabled())
        if len(self.seen) == 2:
            raise KeyError("a bad state")
        return super()._init_group(*args)


@pytest.mark.parametrize("differentiable", [False, True])
@pytest.mark.parametrize("before", [False, True])
def test_gradients_are_computed_as_the_optimizer_says(differentiable: bool, before: bool) -> None:
    parameters, _ = made()
    optimizer = Looks([each.detach() for each in parameters], lr=0.1, differentiable=differentiable)
    optimizer.seen = []
    with torch.set_grad_enabled(before):
        take_step(optimizer)
        assert torch.is_grad_enabled() == before
        with pytest.raises(KeyError, match="a bad state"):
            take_step(optimizer)
        assert torch.is_grad_enabled() == before
    assert optimizer.seen == [differentiable] * 2


def test_hooks_are_called(scopes: list[str]) -> None:
    _, optimizer = made()
    heard: list[str] = []
    handles = [
        optimizer.register_step_pre_hook(lambda *_: heard.append("before")),
        optimizer.register_step_post_hook(lambda *_: heard.append("after")),
        register_optimizer_step_pre_hook(lambda *_: heard.append("before any")),
        register_optimizer_step_post_hook(lambda *_: heard.append("after any")),
    ]
    expected = ["before any", "before", "after", "after any"]
    for handle, name in zip(handles, ("before", "after", "before any", "after any"), strict=True):
        heard.clear()
        take_step(optimizer)
        assert heard == expected
        handle.remove()
        expected.remove(name)
    scopes.clear()
    take_step(optimizer)
    assert not scopes


def test_a_profiler_sees_the_step() -> None:
    _, optimizer = made()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        take_step(optimizer)
    assert "Optimizer.step#SGD.step" in {event.name for event in profile.events() or ()}


def replace_by_method(optimizer: Optimizer, steps: list[str]) -> None:
    inner = type(optimizer).step

    @functools.wraps(inner)
    def step(self: Optimizer) -> None:
        steps.append("own")
        inner(self)

    optimizer.step = types.MethodType(step, optimizer)  # type: ignore[method-assign]


def replace_around(optimizer: Optimizer, steps: list[str]) -> None:
    inner = optimizer.step

    @functools.wraps(inner)
    def step(*rest: Any) -> None:
        steps.append("own")
        inner(*rest)

    optimizer.step = step  # type: ignore[method-assign, assignment]


@pytest.mark.parametrize(
    ("replace", "order"),
    [
        (replace_by_method, "alone"),
        (replace_by_method, "before a schedule"),
        (replace_by_method, "after a schedule"),
        (replace_around, "alone"),
        (replace_around, "after a schedule"),  # before one it is refused by torch
    ],
)
def test_a_step_that_was_replaced_is_called(replace: Any, order: str) -> None:
    _, optimizer = made()
    steps: list[str] = []
    if order == "after a schedule":
        lr_scheduler.StepLR(optimizer, 2)
    replace(optimizer, steps)
    if order == "before a schedule":
        lr_scheduler.StepLR(optimizer, 2)
    take_step(optimizer)
    assert steps == ["own"]


@pytest.mark.parametrize("follows", [False, True])
def test_a_class_that_is_patched_is_called(follows: bool) -> None:
    _, optimizer = made()
    inner, steps = torch.optim.SGD.step, []

    @functools.wraps(inner)
    def step(self: Any, *rest: Any) -> Any:
        steps.append("own")
        return inner(self, *rest)

    with mock.patch.object(torch.optim.SGD, "step", step):
        if follows:
            lr_scheduler.StepLR(optimizer, 2)
        take_step(optimizer)
    assert steps == ["own"]


class Counted(torch.optim.SGD):
    """A subclass with a step of its own."""

    steps = 0

    def step(self, closure: Any = None) -> Any:
        self.steps += 1
        return super().step(closure)


class Duck:
    """No subclass of torch's."""

    steps = 0

    def step(self) -> None:
        self.steps += 1


def test_own_steps_of_subclasses_and_others() -> None:
    parameters, _ = made()
    counted, duck = Counted(parameters, lr=0.1), Duck()
    before = copy.deepcopy(parameters)
    take_step(counted)
    assert counted.steps == 1
    assert not torch.equal(before[0], parameters[0])
    take_step(duck)  # type: ignore[arg-type]
    assert duck.steps == 1


def test_another_torch_is_called_as_usual(monkeypatch: pytest.MonkeyPatch, scopes: list[str]) -> None:
    """One whose wrapper, or whose hooks, are not known."""
    for name, value in (("_HOOKED_CODE", object()), ("_GLOBAL_HOOKS", [None, None]), ("_HOOKS", ("_others",))):
        with monkeypatch.context() as patch:
            patch.setattr(optimizer_step, name, value)
            take_step(made()[1])
            assert scopes.pop() == "Optimizer.step#SGD.step"


def test_only_errors_about_shards_are_explained() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))])
    explain_failure(optimizer, RuntimeError("CUDA error: out of memory"), True)
    mixed = RuntimeError("got mixed torch.Tensor and DTensor\nmore")
    explain_failure(optimizer, mixed, False)
    with pytest.raises(RuntimeError, match=r"^optimizer=SGD cannot step .*\(got mixed torch.Tensor and DTensor\); use"):
        explain_failure(optimizer, mixed, True)


class WithoutStep(Optimizer):
    """As torch's base class, whose step raises an error without a message."""


def test_a_class_without_a_step_is_named() -> None:
    strategy = SingleDevice("cpu")
    strategy.setup()
    optimizer = WithoutStep([nn.Parameter(torch.ones(2))], {"lr": 0.1})
    with pytest.raises(NotImplementedError, match="optimizer=WithoutStep does not implement its step; define step"):
        strategy.step(optimizer)
