"""Lazy modules are refused until they have shapes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.trainer import arguments
from torch import nn

from trainer_kit import Trainer
from trainer_kit.utils.lazy_parameters import check_shapes

pytestmark = pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")


def sentence(name: str) -> str:
    return "^" + re.escape(
        f"{name!r} of this Sequential belongs to a lazy module and has no shape yet; call the model once with a batch "
        "before Trainer(...)"
    )


def test_the_first_tensor_without_a_shape_is_named() -> None:
    check_shapes(nn.BatchNorm1d(2))
    with pytest.raises(ValueError, match=sentence("1.weight")):
        check_shapes(nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(2)))
    with pytest.raises(ValueError, match=sentence("0.running_mean")):
        check_shapes(nn.Sequential(nn.LazyBatchNorm1d(affine=False)))


@pytest.mark.parametrize("has_optimizer", [True, False])
def test_a_lazy_model_trains_once_it_was_called(tmp_path: Path, has_optimizer: bool) -> None:
    def make(model: nn.Module) -> Trainer:
        given: dict[str, Any] = {"optimizer": torch.optim.SGD(model.parameters(), 0.1)} if has_optimizer else {}
        data = [torch.ones(4)] * 8
        return Trainer(model, arguments(tmp_path), data, compute_loss=lambda model, batch: model(batch).mean(), **given)

    model = nn.Sequential(nn.LazyLinear(3))
    for call in (Trainer.train, Trainer.plan):
        with pytest.raises(ValueError, match=sentence("0.weight")):
            call(make(model))
    model(torch.ones(1, 4))
    assert make(model).train().global_step > 0
