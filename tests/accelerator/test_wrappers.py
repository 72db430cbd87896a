"""Prepared optimizers and schedulers: copies of them, and states in other orders in memory."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from trainer_kit.accelerator import Accelerator
from trainer_kit.accelerator.wrappers import PreparedOptimizer, PreparedScheduler


def prepared(accumulation: int = 1) -> tuple[Accelerator, nn.Module, PreparedOptimizer, PreparedScheduler]:
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulation)
    model = nn.Sequential(nn.Conv2d(2, 4, 2), nn.Flatten(), nn.Linear(16, 3)).to(memory_format=torch.channels_last)
    model[2].weight.data = model[2].weight.data.t().contiguous().t()  # type: ignore[union-attr,operator]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    return accelerator, *accelerator.prepare(model, optimizer, scheduler)


def step(accelerator: Accelerator, model: nn.Module, *stepping: Any, first: int, last: int) -> None:
    for number in range(first, last):
        with accelerator.accumulate(model):
            inputs = torch.randn(5, 2, 3, 3, generator=torch.Generator().manual_seed(number))
            accelerator.backward(model(inputs).square().mean())
            for each in stepping:
                each.step()
            stepping[0].zero_grad()


@pytest.mark.parametrize("save_at", [3, 4])  # within an optimizer step too
def test_moments_and_gradients_that_are_not_row_major_are_loaded(save_at: int, tmp_path: Path) -> None:
    whole = prepared(2)
    step(*whole, first=0, last=save_at)
    whole[0].save_state(tmp_path / "state")
    step(*whole, first=save_at, last=10)
    again = prepared(2)
    again[0].load_state(tmp_path / "state")
    for parameter in again[1].parameters():
        gradient = parameter.grad
        assert gradient is None or gradient.stride() == parameter.stride()
    step(*again, first=save_at, last=10)
    assert all(torch.equal(one, two) for one, two in zip(whole[1].parameters(), again[1].parameters(), strict=True))


def test_a_pickled_optimizer_is_the_same_outside_of_the_loop() -> None:
    accelerator, model, optimizer, scheduler = prepared(4)
    step(accelerator, model, optimizer, scheduler, first=0, last=4)
    twin, other = pickle.loads(pickle.dumps((optimizer, scheduler)))
    assert isinstance(twin, PreparedOptimizer)
    assert isinstance(other, PreparedScheduler)
    assert other.optimizers == [twin]
    assert twin.optimizer is other.scheduler.optimizer
    for group, mine in zip(twin.param_groups, optimizer.param_groups, strict=True):
        assert group.keys() == mine.keys()
        for one, two in zip(group["params"], mine["params"], strict=True):
            assert torch.equal(one, two)
            assert all(torch.equal(twin.state[one][name], value) for name, value in optimizer.state[two].items())
    for one, two in zip(twin.param_groups[0]["params"], model.parameters(), strict=True):
        one.grad, two.grad = torch.ones_like(one), torch.ones_like(two)
    twin.step()
    optimizer.optimizer.step()
    assert all(torch.equal(*pair) for pair in zip(twin.param_groups[0]["params"], model.parameters(), strict=True))


def test_a_copied_optimizer_stays_in_the_loop() -> None:
    accelerator, model, optimizer, scheduler = prepared(2)
    twin = copy.deepcopy(optimizer)
    before = [each.detach().clone() for each in twin.param_groups[0]["params"]]
    step(accelerator, model, optimizer, scheduler, first=0, last=1)
    assert not accelerator.sync_gradients
    for each in twin.param_groups[0]["params"]:
        each.grad = torch.ones_like(each)
    twin.step()  # no optimizer step ends here
    assert all(torch.equal(*pair) for pair in zip(twin.param_groups[0]["params"], before, strict=True))
    step(accelerator, model, optimizer, scheduler, first=1, last=2)
    twin.step()
    assert not any(torch.equal(*pair) for pair in zip(twin.param_groups[0]["params"], before, strict=True))


def test_the_norm_of_gradients_in_half_precision_is_computed_in_float32() -> None:
    accelerator, model, _, _ = prepared()
    model.bfloat16()
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 1.0078125)
    count = sum(parameter.numel() for parameter in model.parameters())
    norm = accelerator.clip_grad_norm_(model.parameters(), 0.5)
    assert norm is not None
    assert norm.dtype == torch.float32
    assert norm.item() == pytest.approx(1.0078125 * count**0.5, rel=1e-6)
    squares = sum(float(p.grad.double().square().sum()) for p in model.parameters() if p.grad is not None)
    assert squares**0.5 == pytest.approx(0.5, rel=4e-3)  # each is rounded to bfloat16


def test_every_optimizer_can_be_switched_as_accelerates(monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, optimizer, _ = prepared()
    optimizer.train()
    optimizer.eval()
    calls: list[str] = []
    monkeypatch.setattr(optimizer.optimizer, "train", lambda: calls.append("train"), raising=False)
    optimizer.train()
    assert calls == ["train"]
