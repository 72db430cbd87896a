from __future__ import annotations

import copy
import os

import pytest
import torch
from kit.sized_models import perceptron
from torch import nn

from trainer_kit import Precision, SingleDevice, TrainingArguments
from trainer_kit.memory import measure
from trainer_kit.memory.measuring import runtime_on_cuda
from trainer_kit.memory.step import Step

ARGS = TrainingArguments(use_cpu=True, max_grad_norm=0.0, nonfinite="ignore", optim="sgd")


def summed(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).sum()


def test_a_step_whose_memory_is_known() -> None:
    """Of relu(x w): the result is kept, and the gradient of the product takes as much; then comes that of w."""
    model = nn.Sequential(nn.Linear(100, 1000, bias=False), nn.ReLU())
    found = measure(model, ARGS, torch.randn(50, 100), compute_loss=summed)
    result = 4 * 50 * 1000
    assert found.nbytes("weights") == 4 * 100 * 1000
    assert found.nbytes("batch") == 4 * 50 * 100
    assert found.nbytes("optimizer") == 0
    # relu's result and the gradient of the product, which the product of w's gradient takes
    expected = 4 * 100 * 1000 + 4 * 50 * 100 + result + 4 * 100 * 1000
    assert found.peak == pytest.approx(expected, rel=0.01)
    assert found.peak == sum(component.nbytes for component in found.components)


def test_the_model_stays_as_it_is() -> None:
    model, batch = perceptron(8)
    before, generator = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    first = measure(model.eval(), TrainingArguments(use_cpu=True), batch)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert not any(parameter.grad is not None for parameter in model.parameters())
    assert not model.training
    assert torch.equal(generator, torch.get_rng_state())
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    second = measure(model, TrainingArguments(use_cpu=True), batch, optimizer=optimizer)
    assert second.nbytes("optimizer") == first.nbytes("weights")
    assert not optimizer.state


def test_a_device_that_does_not_tell() -> None:
    with pytest.raises(ValueError, match="device='meta' cannot be measured; use 'cpu' or 'cuda'"):
        measure(nn.Linear(2, 2), ARGS, torch.randn(2, 2), compute_loss=summed, device="meta")


def test_the_profiler_says_nothing_and_others_are_heard(capfd: pytest.CaptureFixture[str]) -> None:
    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        os.write(2, b"of the model\n")
        return summed(model, batch)

    kept = [torch.zeros(10)]

    def replaced(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        kept[0] = torch.zeros(10)  # what was there before the profiler is freed under it
        return loss(model, batch)

    measure(nn.Linear(2, 2), ARGS, torch.randn(2, 2), compute_loss=replaced)
    assert capfd.readouterr().err == "of the model\n" * 3


@pytest.mark.parametrize("tells", [True, False])
def test_what_a_gpus_runtime_takes(tells: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """8 MiB were allocated before; weights and batch take 512 bytes each, workspaces 64 MiB, the context 300 MiB."""
    mib = 2**20
    strategy = SingleDevice("cpu", Precision())
    strategy.setup()
    figures = {"reserved_memory_gib": 80 / 1024} | ({"process_memory_gib": 380 / 1024} if tells else {})
    monkeypatch.setattr(strategy.device_info, "memory", lambda: figures)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 72 * mib + 2 * 512)
    model = nn.Linear(2, 2, bias=False)
    step = Step(model, torch.optim.SGD(model.parameters()), ARGS, torch.randn(2, 2), summed, strategy)
    assert runtime_on_cuda(step, 8 * mib) == (64 * mib, 300 * mib if tells else 0)
