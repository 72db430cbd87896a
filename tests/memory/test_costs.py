"""The known costs, beside tensors that were made."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from trainer_kit import TrainingArguments
from trainer_kit.memory import COSTS, estimate
from trainer_kit.memory.costs import EightBitAdam
from trainer_kit.memory.tracker import Tracker
from trainer_kit.utils.pytree import tensors

COST = {cost.name: cost for cost in COSTS}


def layer() -> nn.Linear:
    return nn.Linear(512, 512, bias=False)


def bytes_of(held: Any) -> int:
    return sum(tensor.nbytes for tensor in tensors(held))


def stepped(make: Callable[..., torch.optim.Optimizer], **given: Any) -> torch.optim.Optimizer:
    """An optimizer after a step on a matrix."""
    module = layer()
    optimizer = make(module.parameters(), **given)
    module(torch.randn(2, 512)).sum().backward()
    optimizer.step()
    return optimizer


@pytest.mark.parametrize(
    ("name", "make", "given"),
    [
        ("AdamW", torch.optim.AdamW, {}),
        ("SGD", torch.optim.SGD, {"lr": 0.1}),
        ("SGD with momentum", torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
        ("Muon", torch.optim.Muon, {}),
        ("Adafactor", torch.optim.Adafactor, {}),
        ("8-bit AdamW", EightBitAdam, {}),
    ],
)
def test_states_of_optimizers(name: str, make: Any, given: dict[str, Any]) -> None:
    state = bytes_of(dict(stepped(make, **given).state))
    assert COST[name].component == "optimizer"
    assert state / 512**2 == pytest.approx(COST[name].nbytes, abs=0.02)


def test_weights_and_gradients() -> None:
    module = layer()
    module(torch.randn(2, 512)).sum().backward()
    assert bytes_of([*module.parameters()]) / 512**2 == COST["float32 weights"].nbytes
    assert bytes_of([each.grad for each in module.parameters()]) / 512**2 == COST["float32 gradients"].nbytes
    half = copy.deepcopy(module).to(torch.bfloat16)
    assert bytes_of([*half.parameters()]) / 512**2 == COST["bfloat16 or float16 weights"].nbytes
    both = bytes_of([*module.parameters(), *half.parameters()])
    assert both / 512**2 == COST["mixed precision with a float32 master copy"].nbytes


def test_copies_that_autocast_keeps() -> None:
    model, tracker = nn.Sequential(layer(), nn.ReLU(), layer()), Tracker()
    tracker.mark("weights", model.parameters())
    with tracker.following(), torch.autocast("cpu", torch.bfloat16):
        output = model(torch.randn(2, 512)) + model(torch.randn(2, 512))  # casts once
    found, parameters = tracker.peak(), 2 * 512**2
    assert found["weights"] / parameters == COST["float32 weights"].nbytes
    assert found["casts"] / parameters == COST["autocast's copies of float32 weights"].nbytes
    del output


def test_the_state_of_8_bit_adam_is_that_of_a_package() -> None:
    packages = pytest.importorskip("torchao.optim", reason="needs torchao, whose state is looked at")
    module = nn.Linear(512, 300)
    module(torch.randn(2, 512)).sum().backward()
    ours, theirs = EightBitAdam(module.parameters()), packages.AdamW8bit(module.parameters())
    with torch.compiler.set_stance("force_eager"):
        for optimizer in (ours, theirs):
            optimizer.step()
    for parameter in module.parameters():
        flat = [
            part
            for value in theirs.state[parameter].values()
            for part in ((value.codes, value.scale) if hasattr(value, "codes") else (value,))
            if part.ndim
        ]
        assert bytes_of(flat) == bytes_of(dict(ours.state[parameter]))


def test_an_estimate_takes_8_bit_adam_where_no_package_is() -> None:
    args = TrainingArguments(use_cpu=True, optim="adamw_8bit")
    found = estimate(layer(), args, torch.randn(2, 512), compute_loss=lambda model, batch: model(batch).sum())
    assert found.nbytes("optimizer") / found.parameters == pytest.approx(COST["8-bit AdamW"].nbytes)


def test_every_cost_says_whose_it_is() -> None:
    assert all(len(cost.source) > 5 and cost.nbytes >= 0 for cost in COSTS)
