from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from trainer_kit.callbacks import Freezing
from trainer_kit.run import Run


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1))


def changed(run: Run, take_step: Any, *callbacks: Freezing, steps: int = 10) -> dict[str, list[int]]:
    """The steps in which each parameter changed, with an optimizer that decays weights and has momentum."""
    run.optimizer = torch.optim.AdamW(run.model.parameters(), lr=0.1, weight_decay=0.1)
    for callback in callbacks:
        callback.on_train_begin(run)
    moved: dict[str, list[int]] = {name: [] for name, _ in run.model.named_parameters()}
    while run.state.step < steps:
        before = copy.deepcopy(run.model.state_dict())
        for callback in callbacks:
            callback.on_step_begin(run)
        run.model(torch.randn(8, 4)).square().mean().backward()
        run.optimizer.step()
        run.optimizer.zero_grad()
        take_step(run)
        for name, tensor in run.model.state_dict().items():
            if not torch.equal(tensor, before[name]):
                moved[name].append(run.state.step)
    for callback in callbacks:
        callback.on_train_end(run, None)
    return moved


ALL = list(range(1, 11))


@pytest.mark.parametrize(
    ("schedule", "first_layer"),
    [
        ({}, []),
        ({"until_step": 3}, ALL[3:]),
        ({"until_epoch": 1}, ALL[5:]),
        ({"from_step": 7}, ALL[:7]),
        ({"from_step": 2, "until_step": 4}, [1, 2, *ALL[4:]]),
    ],
)
def test_what_moves_when(
    make_run: Callable[..., Run], take_step: Any, schedule: dict[str, int], first_layer: list[int]
) -> None:
    run = make_run(model())
    moved = changed(run, take_step, Freezing(["0.*", "1.bias"], **schedule))
    assert moved == {
        "0.weight": first_layer,
        "0.bias": first_layer,
        "1.weight": ALL,
        "1.bias": first_layer,
        "2.weight": ALL,
        "2.bias": ALL,
    }
    assert all(parameter.requires_grad for parameter in run.model.parameters())


def test_a_resumed_run_freezes_by_the_step_it_is_at(make_run: Callable[..., Run], take_step: Any) -> None:
    for step, expected in ((2, ALL[4:]), (6, ALL[6:])):
        run = make_run(model())
        run.state.step = step
        assert changed(run, take_step, Freezing("0.*", until_step=4))["0.weight"] == expected


def test_layer_by_layer(make_run: Callable[..., Run], take_step: Any) -> None:
    run = make_run(model())
    moved = changed(run, take_step, Freezing("0.*", until_step=6), Freezing("1.*", until_step=3))
    assert (moved["0.weight"], moved["1.weight"], moved["2.weight"]) == (ALL[6:], ALL[3:], ALL)


def test_a_gradient_from_before_is_dropped(make_run: Callable[..., Run]) -> None:
    """Else the optimizer would go on stepping with it."""
    run, callback = make_run(model()), Freezing("0.*", from_step=1)
    callback.on_train_begin(run)
    run.model(torch.randn(8, 4)).sum().backward()
    run.state.step = 1
    callback.on_step_begin(run)
    named = dict(run.model.named_parameters())
    assert {name for name, parameter in named.items() if parameter.grad is None} == {"0.weight", "0.bias"}


def test_what_needed_no_gradient_before_stays_so(make_run: Callable[..., Run], take_step: Any) -> None:
    run = make_run(model())
    run.model[0].weight.requires_grad_(False)  # type: ignore[index]
    changed(run, take_step, Freezing("0.*", until_step=2))
    assert [parameter.requires_grad for parameter in run.model[0].parameters()] == [False, True]  # type: ignore[index]


def test_an_error_gives_the_model_back_as_it_was(make_run: Callable[..., Run]) -> None:
    run, callback = make_run(model()), Freezing("0.*")
    callback.on_train_begin(run)
    assert not run.model[0].weight.requires_grad  # type: ignore[index]
    callback.on_exception(run, ValueError())
    assert run.model[0].weight.requires_grad  # type: ignore[index]


def test_a_pattern_without_a_match_is_named(make_run: Callable[..., Run]) -> None:
    with pytest.raises(ValueError, match=r"'encoder\.\*' matches no parameter.*'0\.weight', '0\.bias'"):
        Freezing(["0.*", "encoder.*"]).on_train_begin(make_run(model()))


def test_something_must_be_left_to_train(make_run: Callable[..., Run]) -> None:
    run = make_run(model())
    callback = Freezing("*", until_step=2)
    with pytest.raises(ValueError, match="every parameter"):
        callback.on_train_begin(run)
    callback.on_exception(run, ValueError())
    assert all(parameter.requires_grad for parameter in run.model.parameters())


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"patterns": []}, "patterns"),
        ({"patterns": "*", "until_step": 3, "from_step": 3}, "until_step"),
        ({"patterns": "*", "until_epoch": 0}, "until_epoch"),
    ],
)
def test_options_that_make_no_sense(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        Freezing(**options)
