"""Two models and two optimizers, as a GAN has them."""

from __future__ import annotations

import copy
import gc
import weakref
from pathlib import Path
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


def alike(step: int) -> tuple[Accelerator, list[Any], list[Any]]:
    """Two models of equal shapes with an optimizer each, whose parameters come in their order or against it."""
    torch.manual_seed(2)
    accelerator = Accelerator(cpu=True)
    models = [nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))) for _ in range(2)]
    mixed = [[*models[0].parameters(), models[1][0].weight], [*models[1].parameters()][1:]]
    optimizers = [torch.optim.AdamW(parameters[::step], lr=0.1) for parameters in mixed]
    prepared = accelerator.prepare(*models, *optimizers)
    return accelerator, [*prepared[:2]], [*prepared[2:]]


def trained(accelerator: Accelerator, models: list[Any], optimizers: list[Any], steps: range) -> list[torch.Tensor]:
    for step in steps:
        accelerator.backward(models[1](models[0](torch.full((2, 4), 0.1 * step + 1)).tanh()).square().mean())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return [value.detach().clone() for model in models for value in model.state_dict().values()]


def test_parameters_in_another_order_get_their_own_moments(tmp_path: Path) -> None:
    straight = trained(*alike(1), range(6))
    first = alike(1)
    trained(*first, range(3))
    first[0].save_state(tmp_path / "state")
    second = alike(-1)
    second[0].load_state(tmp_path / "state")
    for one, other in zip(trained(*second, range(3, 6)), straight, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_optimizers_in_another_order_are_refused(tmp_path: Path) -> None:
    accelerator, models, _ = alike(1)
    accelerator.save_state(tmp_path / "state")
    accelerator = Accelerator(cpu=True)
    optimizers = [torch.optim.AdamW(model.parameters()) for model in models]
    accelerator.prepare(*models, *optimizers)
    with pytest.raises(
        ValueError, match=r"the optimizer has groups of \[6\] parameters, but .*state was made with \[7\]"
    ):
        accelerator.load_state(tmp_path / "state")
    first, second = (torch.optim.AdamW(model[:2].parameters()) for model in models)
    one, other = Accelerator(cpu=True), Accelerator(cpu=True)
    one.prepare(*models, first, second)
    one.save_state(tmp_path / "one")
    other.prepare(*models, second, first)
    message = "group 0 of the optimizer has 'model_1.0.weight' where .*one has 'model.0.weight'; resume with the same"
    with pytest.raises(ValueError, match=message):
        other.load_state(tmp_path / "one")
