"""Two models and two optimizers, as a GAN has them."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from kit.ranks import on_ranks
from torch import nn

from trainer_kit import Accelerator


def generator() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))


def gan() -> list[torch.Tensor]:
    """The usual order: the discriminator steps while the generator's graph is still needed."""
    accelerator = Accelerator(cpu=True)
    made, judged = generator(), nn.Linear(2, 1)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (made, judged)]
    made, judged, first, second = accelerator.prepare(made, judged, *optimizers)
    torch.manual_seed(accelerator.process_index)
    for _ in range(3):
        fake = made(torch.randn(4, 2))
        second.zero_grad()
        accelerator.backward((judged(torch.randn(4, 2)) - judged(fake.detach())).mean())
        second.step()
        first.zero_grad()
        accelerator.backward(judged(fake).mean())
        first.step()
    return [
        value.clone() for model in (made, judged) for value in accelerator.unwrap_model(model).state_dict().values()
    ]


@pytest.mark.scenario
def test_a_gan_with_batch_norm_trains_on_two_processes() -> None:
    first, second = on_ranks(2, gan)
    for ours, theirs in zip(first, second, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def freed() -> bool:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(nn.Linear(2, 2))
    kept = weakref.ref(accelerator.unwrap_model(model))
    accelerator.backward(model(torch.ones(1, 2)).sum())
    (model,) = accelerator.free_memory(model)
    gc.collect()
    return kept() is None


@pytest.mark.scenario
def test_free_memory_lets_go_of_the_model() -> None:
    assert freed()
    assert on_ranks(2, freed) == [True, True]


class Weight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, by: float) -> torch.Tensor:
        return (self.weight * by).sum()


@pytest.mark.parametrize("clips", [True, False])
@pytest.mark.parametrize("overflows", [True, False])
def test_fp16_takes_the_scale_out_of_each_optimizers_gradients_once(clips: bool, overflows: bool) -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="fp16")
    one, other = Weight(), Weight()
    optimizers: Any = [torch.optim.SGD(model.parameters(), lr=1.0) for model in (one, other)]
    one, other, first, second = accelerator.prepare(one, other, *optimizers)
    for _ in range(2):
        accelerator.backward(one(float("inf") if overflows else 0.5) + other(0.5))
        if clips and not overflows:
            accelerator.clip_grad_norm_([*one.parameters(), *other.parameters()], 100.0)
        first.step()
        second.step()
        assert first.step_was_skipped == overflows
        assert not second.step_was_skipped
        first.zero_grad()
        second.zero_grad()
    assert other.weight.item() == -1.0
    assert one.weight.item() == (0.0 if overflows else -1.0)


def test_whether_a_step_was_skipped_can_be_read_later() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="fp16")
    one, other = Weight(), Weight()
    optimizers: Any = [torch.optim.SGD(model.parameters(), lr=1.0) for model in (one, other)]
    one, other, first, second = accelerator.prepare(one, other, *optimizers)
    accelerator.backward(one(0.5) + other(float("inf")))
    first.step()
    second.step()
    second.zero_grad()
    accelerator.backward(one(0.5) + other(0.5))  # the scaler begins a new step
    copied = copy.deepcopy(second)
    assert not first.step_was_skipped
    assert second.step_was_skipped
    assert second.step_was_skipped  # again
    assert copied.step_was_skipped
    second.step()
    assert not second.step_was_skipped
    assert accelerator.optimizer_step_was_skipped is False
