"""Factors that only timm's schedules apply."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.datasets import points
from kit.models import Linear
from kit.trainer import arguments

from trainer_kit import Trainer
from trainer_kit.utils.rate_scales import warn_of_rate_scales


def grouped(model: torch.nn.Module, **second: Any) -> torch.optim.Optimizer:
    first, *others = model.parameters()
    return torch.optim.SGD([{"params": [first], "lr_scale": 0.25}, {"params": others, **second}], lr=0.1)


def test_they_are_a_warning_where_nothing_applies_them(tmp_path: Path) -> None:
    model = Linear()
    message = r"have an 'lr_scale' from 0.25 to 1, which only timm's schedules apply, .* \*= group\['lr_scale'\]"
    with pytest.warns(UserWarning, match=message):
        Trainer(model, arguments(tmp_path, max_steps=1), points(8), optimizer=grouped(model, lr_scale=1.0)).train()


@pytest.mark.parametrize("second", [{"lr_scale": 0.25}, {"lr_scale": 1.0, "lr": 0.4}, {}, {"lr_scale": 1.0, "lr": 0.0}])
def test_rates_that_are_as_they_were_given(second: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer = grouped(Linear(), **second)
        if second.get("lr") == 0.0:  # as at the start of a warm-up
            optimizer.param_groups[0]["lr"] = 0.0
        warn_of_rate_scales(optimizer)
