"""Layers that pack their weights for inference stay trainable."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from kit.trainer import arguments

from trainer_kit import Accelerator, Trainer
from trainer_kit.utils.packed_layers import keep_unpacked


class Packing(torch.nn.Linear):
    """Packs like `Linear4bit`: after a forward pass in evaluation mode, it passes no gradient to its input."""

    support_avx512bf16_for_cpu = True
    is_packed = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.is_packed |= self.support_avx512bf16_for_cpu and not self.training
        return super().forward(x.detach() if self.is_packed else x)


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = torch.nn.Linear(4, 4), Packing(4, 2)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(self.last(self.first(x)), labels)


def test_gradients_pass_after_an_evaluation(tmp_path: Path) -> None:
    data = [{"x": torch.randn(4), "labels": i % 2} for i in range(16)]
    model = Model()
    before = model.first.weight.clone()
    trainer = Trainer(model, arguments(tmp_path), data, data)
    trainer.evaluate()
    trainer.train()
    assert not model.last.is_packed
    assert not torch.equal(before, model.first.weight)


def test_the_accelerator_prepares_it_too() -> None:
    model = Model()
    Accelerator(cpu=True).prepare(model)
    assert not model.last.support_avx512bf16_for_cpu


def test_other_layers_are_left_alone() -> None:
    layer = torch.nn.Linear(2, 2)
    keep_unpacked(layer)
    assert "support_avx512bf16_for_cpu" not in vars(layer)


@pytest.mark.ecosystem
def test_bitsandbytes() -> None:
    layer = pytest.importorskip("bitsandbytes").nn.Linear4bit(64, 64, bias=False).to("cpu")
    x = torch.randn(3, 64, requires_grad=True)
    assert hasattr(layer, "support_avx512bf16_for_cpu")
    keep_unpacked(layer)
    with torch.no_grad():
        layer.eval()(x)
    layer.train()(x).sum().backward()
    assert x.grad is not None
