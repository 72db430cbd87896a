"""Evaluation mode of modules."""

from __future__ import annotations

import pytest
from torch import nn

from trainer_kit.utils.module_modes import evaluating


def test_each_module_gets_its_mode_back() -> None:
    model = nn.Sequential(nn.Dropout(), nn.Dropout())
    model[1].eval()
    with evaluating(model):
        assert not any(module.training for module in model.modules())
    assert [module.training for module in model.modules()] == [True, True, False]
    with pytest.raises(ZeroDivisionError), evaluating(model):
        raise ZeroDivisionError
    assert [module.training for module in model.modules()] == [True, True, False]
