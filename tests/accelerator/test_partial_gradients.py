"""The gradients of an unfinished optimizer step: those of several models, and none where there were none."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from trainer_kit.accelerator import Accelerator
from trainer_kit.accelerator.partial_gradients import partial_gradients, restore_gradients
from trainer_kit.strategies.single import SingleDevice


def test_gradients_of_several_models_come_back() -> None:
    strategy, models = SingleDevice(device="cpu"), [nn.Linear(2, 3), nn.Linear(2, 3)]
    models[0].bias.requires_grad_(False)
    models[1](torch.rand(4, 2)).square().sum().backward()
    saved = partial_gradients(strategy, models)
    assert saved.keys() == {"1.weight", "1.bias"}
    kept = {name: value.clone() for name, value in saved.items()}
    models[0](torch.rand(4, 2)).square().sum().backward()
    models[1].zero_grad()
    restore_gradients(strategy, models, kept)
    assert all(parameter.grad is None for parameter in models[0].parameters())
    for name, parameter in models[1].named_parameters():
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, kept[f"1.{name}"])


def test_a_loaded_state_replaces_gradients(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(nn.Linear(2, 2))
    accelerator.save_state(tmp_path / "state")
    accelerator.backward(model(torch.ones(2, 2)).sum())
    accelerator.load_state(tmp_path / "state")
    assert all(parameter.grad is None for parameter in model.parameters())
