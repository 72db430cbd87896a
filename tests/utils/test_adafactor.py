"""Adafactor for CUDA takes the steps of torch's."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from trainer_kit.utils.adafactor import Adafactor


def model_of(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.LayerNorm(4), nn.Conv1d(4, 3, 2), nn.Linear(3, 2)).to(dtype)
    model[3].weight.requires_grad_(False)
    return model


def trained(make: type[torch.optim.Adafactor], dtype: torch.dtype, scale: float, foreach: bool = True) -> nn.Module:
    """Take steps with gradients of different sizes, interrupted by a checkpoint and a new learning rate."""
    model = model_of(dtype)
    options = {"lr": 0.1, "weight_decay": 0.1, "foreach": foreach}
    optimizer = make(model.parameters(), **options)
    generator = torch.Generator().manual_seed(1)
    for step in range(6):
        for parameter in model.parameters():
            if parameter.requires_grad and step != parameter.ndim:
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.grad = (noise * scale**step).to(dtype)
        if step == 3:
            state = optimizer.state_dict()
            optimizer = make(model.parameters(), **options)
            optimizer.load_state_dict(state)
            optimizer.param_groups[0]["lr"] = 0.03
        assert optimizer.step(lambda: 7.0) == 7.0
        optimizer.zero_grad()
    return model


@pytest.mark.parametrize("scale", [0.1, 1.0, 50.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_its_bits_are_those_of_torchs_foreach(dtype: torch.dtype, scale: float) -> None:
    ours, theirs = trained(Adafactor, dtype, scale), trained(torch.optim.Adafactor, dtype, scale)
    for own, reference in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(own, reference)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_its_numbers_are_those_of_torchs_loop(dtype: torch.dtype) -> None:
    ours, theirs = trained(Adafactor, dtype, 2.0), trained(torch.optim.Adafactor, dtype, 2.0, foreach=False)
    for own, reference in zip(ours.parameters(), theirs.parameters(), strict=True):
        rounding = 100 * torch.finfo(dtype).eps  # of 6 steps
        torch.testing.assert_close(own, reference, rtol=rounding, atol=rounding / 100)
