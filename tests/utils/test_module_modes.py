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


def test_buffers_are_those_from_before() -> None:
    model = nn.BatchNorm1d(2)
    before, values = model.running_mean, model.running_mean.tolist()  # type: ignore[union-attr]
    with buffers_aside(model):
        model(torch.randn(4, 2))
        assert model.running_mean.tolist() != values  # type: ignore[union-attr]
    assert model.running_mean is before
    assert before.tolist() == values  # type: ignore[union-attr]
