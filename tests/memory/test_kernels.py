"""What operators take for themselves, beside what the allocator counted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kit.sized_models import without_onednn
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from trainer_kit import TrainingArguments
from trainer_kit.memory import measure
from trainer_kit.memory.estimation import estimate
from trainer_kit.memory.kernels import hidden_on_cpu


class Largest(TorchDispatchMode):
    """The most that an operator was said to take."""

    most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.most = max(self.most, hidden_on_cpu(func, args, result))
        return result


def summed(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).exp().sum()


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="needs oneDNN")
@pytest.mark.parametrize("channels", [3, 32])
def test_a_convolution(channels: int) -> None:
    model = nn.Sequential(nn.Conv2d(channels, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32))
    batch, args = torch.randn(4, channels, 32, 32), TrainingArguments(use_cpu=True, optim="sgd")
    with Largest() as largest:
        summed(model, batch).backward()
    image = 4 * 4 * 32 * 32 * 32
    assert image <= largest.most <= 2.1 * image
    estimated, measured = (function(model, args, batch, compute_loss=summed) for function in (estimate, measure))
    assert estimated.peak == pytest.approx(measured.peak, rel=0.02)
    assert estimated.peak > 0.75 * largest.most + 2 * image


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("samples", [2, 16])
def test_a_convolution_that_onednn_does_not_compute(dtype: torch.dtype, samples: int) -> None:
    model = nn.Sequential(nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, stride=2)).to(dtype)
    batch, args = torch.randn(samples, 8, 32, 32, dtype=dtype), TrainingArguments(use_cpu=True, optim="sgd")
    with without_onednn():
        estimated, measured = (function(model, args, batch, compute_loss=summed) for function in (estimate, measure))
    assert estimated.peak == pytest.approx(measured.peak, rel=0.02)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_processor_says_which_dtypes_onednn_computes(dtype: torch.dtype) -> None:
    image, weight = torch.zeros(2, 16, 8, 8, dtype=dtype), torch.zeros(16, 16, 3, 3, dtype=dtype)
    result = torch.zeros(2, 16, 8, 8, dtype=dtype)
    kind = "fp16" if dtype is torch.float16 else "bf16"
    supported = getattr(torch.ops.mkldnn, f"_is_mkldnn_{kind}_supported")()
    columns = 2 * 64 * 16 * 9 * 2
    assert (hidden_on_cpu(torch.ops.aten.convolution.default, (image, weight), result) == columns) != supported
    with without_onednn():
        assert hidden_on_cpu(torch.ops.aten.convolution.default, (image, weight), result) == columns


def test_all_others_take_nothing_of_note() -> None:
    with Largest() as largest:
        nn.Linear(8, 8)(torch.randn(4, 8)).relu().sum().backward()
    assert largest.most == 0
