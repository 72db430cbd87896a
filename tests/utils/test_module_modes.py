"""Modes and state of modules, which a context restores."""

from __future__ import annotations

import random
from collections import deque
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from trainer_kit.utils.module_modes import evaluating, state_aside


def test_each_module_gets_its_mode_back() -> None:
    model = nn.Sequential(nn.Dropout(), nn.Dropout())
    model[1].eval()
    with evaluating(model):
        assert not any(module.training for module in model.modules())
    assert [module.training for module in model.modules()] == [True, True, False]
    with pytest.raises(ZeroDivisionError), evaluating(model):
        raise ZeroDivisionError
    assert [module.training for module in model.modules()] == [True, True, False]


class Merged(nn.Linear):
    """As loralib: the weights of an adapter are merged in evaluation mode, and split again by `train`."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.merged = False
        self.calls: list[bool] = []

    def train(self, mode: bool = True) -> Merged:
        self.calls.append(mode)
        super().train(mode)
        self.merged = not mode
        return self


class Frozen(nn.Sequential):
    """A wrapper whose `train` leaves its first part in evaluation mode."""

    def train(self, mode: bool = True) -> Frozen:
        super().train(mode)
        self[0].eval()
        return self


def test_a_modules_own_train_is_called_on_exit() -> None:
    model = nn.Sequential(Merged(), nn.Sequential(Merged(), nn.Dropout()))
    with evaluating(model):
        assert model[0].merged
        assert model[1][0].merged
    assert not model[0].merged
    assert not model[1][0].merged
    assert model[0].calls == model[1][0].calls == [False, True]
    assert all(module.training for module in model.modules())


def test_modules_below_ones_with_their_own_train_get_their_modes_back() -> None:
    model = nn.Sequential(Frozen(nn.Dropout(), Merged(), nn.Dropout())).train()
    model[0][1].eval()
    model[0][2].eval()
    with evaluating(model):
        assert model[0][1].merged
    assert [module.training for module in model.modules()] == [True, True, False, False, False]
    assert model[0][1].merged

    model[0][0].train()
    with evaluating(model):
        assert not any(module.training for module in model.modules())
    assert model[0][0].training


def test_a_train_method_of_the_object_is_called() -> None:
    model, seen = nn.Dropout(), []

    def train(mode: bool = True) -> nn.Module:
        seen.append(mode)
        return nn.Module.train(model, mode)

    model.train = train  # type: ignore[method-assign]
    with evaluating(model):
        assert not model.training
    assert seen == [False, True]
    assert model.training


class Stateful(nn.Module):
    """A model that carries state of each kind from one pass to the next."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bank", torch.zeros(0, 2))
        self.register_buffer("count", torch.zeros(()))
        self.hidden: torch.Tensor | None = torch.zeros(2)
        self.pair = (torch.ones(1), 3)
        self.memory = {"last": [torch.ones(2)], "seen": deque([1], maxlen=3)}
        self.names = {"a"}
        self.array = np.zeros(2)
        self.steps = 0
        self.weight = nn.Parameter(torch.ones(2))
        self.weights = [self.weight]
        self.generators = [torch.Generator(), np.random.default_rng(0), np.random.RandomState(0), random.Random(0)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.bank = torch.cat([self.bank, x])
        self.count += 1  # in place
        self.hidden, self.late, self.steps = None, 1, self.steps + 1
        self.pair[0].add_(1)
        self.memory["last"][0].add_(1)
        self.memory["last"].append(x)
        self.memory["seen"].append(2)
        self.memory["new"] = 1
        self.names.add("b")
        self.array += 1
        assert self.weights[0] is self.weight
        return x * self.weight + self.draws()[0]

    def draws(self) -> list[float]:
        torchs, generator, state, python = self.generators
        return [torch.rand((), generator=torchs).item(), generator.random(), state.rand(), python.random()]  # type: ignore[call-overload,attr-defined,union-attr]


def test_the_state_of_a_model_is_that_from_before() -> None:
    torch.manual_seed(0)
    model, expected = nn.Sequential(Stateful()), Stateful()
    state, names = model[0], {*vars(model[0])}
    held = [state.bank, state.count, state.hidden, state.pair, state.memory, state.array, *state.generators]
    for _ in range(2):
        with state_aside(model):
            model(torch.ones(3, 2))
            assert state.steps == 1
            assert len(state.bank) == 3
            model(torch.ones(3, 2))
            assert len(state.memory["last"]) == 3
    with pytest.raises(RuntimeError), state_aside(model):
        model(torch.ones(3, 5))
    after = [state.bank, state.count, state.hidden, state.pair, state.memory, state.array, *state.generators]
    assert all(each is one for each, one in zip(after, held, strict=True))
    assert {*vars(state)} == names
    assert (state.steps, state.names, len(state.bank), float(state.count)) == (0, {"a"}, 0, 0.0)
    assert str((state.hidden, state.pair, state.memory, state.array)) == str(
        (expected.hidden, expected.pair, expected.memory, expected.array)
    )
    assert state.draws() == expected.draws()


def test_what_two_modules_share_is_copied_once() -> None:
    model = nn.Sequential(nn.Identity(), nn.Identity())
    model[0].state = model[1].state = [torch.zeros(2)]
    with state_aside(model):
        model[0].state[0] += 1
        assert model[1].state[0].tolist() == [1, 1]
    assert model[0].state is model[1].state
    assert model[0].state[0].tolist() == [0, 0]


def test_a_module_may_register_a_buffer_in_the_pass() -> None:
    model = nn.BatchNorm1d(2)
    with state_aside(model):
        model(torch.randn(4, 2))
        model.register_buffer("late", torch.ones(1))
        del model.running_var
    assert set(model.state_dict()) == set(nn.BatchNorm1d(2).state_dict())
    assert model.running_mean.tolist() == [0, 0]  # type: ignore[union-attr]


def test_hooks_and_the_flag_of_their_installation_go_together() -> None:
    """transformers' models install hooks that capture outputs in the first pass, and set a flag then."""

    class Installing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.installed = nn.Linear(2, 2), False
            self.captured: list[Any] = []

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not self.installed:
                self.layer.register_forward_hook(lambda *given: self.captured.append(given))
                self.installed, self.layer = True, nn.Sequential(self.layer)
            out: torch.Tensor = self.layer(x)
            return out

    model = Installing()
    layer = model.layer
    for _ in range(2):
        with state_aside(model):
            model(torch.ones(1, 2))
            assert len(model.captured) == 1
        assert (model.layer, model.installed, model.captured, len(layer._forward_hooks)) == (layer, False, [], 0)


def test_what_a_hook_fills_is_what_the_module_reads() -> None:
    model, found = nn.Sequential(nn.Linear(2, 2)), dict[str, Any]()
    model.found = found
    model[0].register_forward_hook(lambda *given: found.update(out=given))
    with state_aside(model):
        model(torch.ones(1, 2))
        assert model.found.keys() == {"out"}
    assert model.found is found
    assert found == {}


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_a_scripted_module_gets_its_buffers_back() -> None:
    model = torch.jit.script(nn.BatchNorm1d(2))
    with state_aside(model):
        model(torch.randn(4, 2))
        assert model.running_mean.tolist() != [0, 0]
    assert model.running_mean.tolist() == [0, 0]
