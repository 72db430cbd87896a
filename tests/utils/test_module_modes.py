"""Modes and buffers of modules, which a context restores."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from trainer_kit.utils.module_modes import buffers_aside, evaluating


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


def test_buffers_are_those_from_before() -> None:
    model = nn.BatchNorm1d(2)
    before, values = model.running_mean, model.running_mean.tolist()  # type: ignore[union-attr]
    with buffers_aside(model):
        model(torch.randn(4, 2))
        assert model.running_mean.tolist() != values  # type: ignore[union-attr]
    assert model.running_mean is before
    assert before.tolist() == values  # type: ignore[union-attr]
