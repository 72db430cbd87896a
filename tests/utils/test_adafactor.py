"""Adafactor takes the steps of transformers' with an absolute learning rate."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers.optimization import Adafactor

from trainer_kit.utils.adafactor import UnscaledAdafactor


def trained(make: Any, dtype: torch.dtype, scale: float) -> nn.Module:
    """Take steps with gradients of different sizes, interrupted by a checkpoint and a new learning rate."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.LayerNorm(4), nn.Conv1d(4, 3, 2), nn.Linear(3, 2)).to(dtype)
    model[3].weight.requires_grad_(False)
    optimizer = make(model)
    generator = torch.Generator().manual_seed(1)
    for step in range(6):
        for parameter in model.parameters():
            if parameter.requires_grad and step != parameter.ndim:
                parameter.grad = (torch.randn(parameter.shape, generator=generator) * scale**step).to(dtype)
        if step == 3:
            state = optimizer.state_dict()
            optimizer = make(model)
            optimizer.load_state_dict(state)
            optimizer.param_groups[0]["lr"] = 0.03
        optimizer.step()
        optimizer.zero_grad()
    return model


def ours(model: nn.Module) -> torch.optim.Optimizer:
    return UnscaledAdafactor(model.parameters(), lr=0.1, weight_decay=0.1)


def theirs(model: nn.Module) -> torch.optim.Optimizer:
    options: dict[str, Any] = {"scale_parameter": False, "relative_step": False}
    return Adafactor(model.parameters(), lr=0.1, weight_decay=0.1, **options)


@pytest.mark.parametrize("scale", [1e-5, 0.1, 1.0, 50.0])
@pytest.mark.parametrize(("dtype", "rounding"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
def test_its_steps_are_those_of_transformers(dtype: torch.dtype, rounding: float, scale: float) -> None:
    own, reference = trained(ours, dtype, scale), trained(theirs, dtype, scale)
    for parameter, expected in zip(own.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(parameter, expected, rtol=rounding, atol=rounding)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_weights_of_16_bits_have_a_state_of_32(dtype: torch.dtype) -> None:
    """Else small gradients make no state, and large ones are never forgotten."""
    generator = torch.Generator().manual_seed(1)
    models = [nn.Linear(5, 4).to(dtype), nn.Linear(5, 4).to(dtype)]
    models[1].load_state_dict(models[0].state_dict())
    optimizers = [ours(models[0]), theirs(models[1])]
    for step in range(50):
        for shape, *parameters in zip([(4, 5), (4,)], *(each.parameters() for each in models), strict=True):
            grad = torch.randn(shape, generator=generator) * (1 if step < 20 else 1e-4)
            for parameter in parameters:
                parameter.grad = grad.to(dtype)
        for optimizer in optimizers:
            optimizer.step()
        if step == 30:
            state = optimizers[0].state_dict()
            optimizers[0] = ours(models[0])
            optimizers[0].load_state_dict(state)
    for parameter, expected in zip(*(each.parameters() for each in models), strict=True):
        torch.testing.assert_close(parameter, expected, rtol=torch.finfo(dtype).eps, atol=torch.finfo(dtype).eps)
        states = optimizers[0].state[parameter]
        assert {value.dtype for value in states.values()} == {torch.float32}


def test_a_closure_gives_the_loss() -> None:
    model = nn.Linear(2, 2)
    assert UnscaledAdafactor(model.parameters(), lr=0.1).step(lambda: 7.0) == 7.0
