"""Models and batches whose memory is estimated and measured."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    ResNetConfig,
    ResNetForImageClassification,
)


class Checkpointed(nn.Module):
    """A part of a model whose activations can be computed again."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part
        self.recomputes = False

    def forward(self, x: torch.Tensor) -> Any:
        return checkpoint(self.part, x, use_reentrant=False) if self.recomputes else self.part(x)


class Recomputing(nn.Module):
    """Turns checkpointing on, by transformers' name."""

    def gradient_checkpointing_enable(self) -> None:
        for module in self.modules():
            if isinstance(module, Checkpointed):
                module.recomputes = True


def block(width: int) -> nn.Module:
    return nn.Sequential(nn.ReLU(), nn.Dropout(0.1), nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width))


class Perceptron(Recomputing):
    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.first = nn.Linear(64, width)
        self.blocks = nn.Sequential(Checkpointed(block(width)), Checkpointed(block(width)))
        self.last = nn.Linear(width, 10)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": nn.functional.cross_entropy(self.last(self.blocks(self.first(x))), labels)}


class ResNet(Recomputing):
    def __init__(self) -> None:
        super().__init__()
        config = ResNetConfig(
            embedding_size=16, hidden_sizes=[32, 64], depths=[2, 2], layer_type="basic", num_labels=10
        )
        self.net = ResNetForImageClassification(config)
        stages = self.net.resnet.encoder.stages
        for number, stage in enumerate(stages):
            stages[number] = Checkpointed(stage)

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor) -> Any:
        return self.net(pixel_values, labels=labels)


def perceptron(samples: int = 256) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    return Perceptron(), {"x": torch.randn(samples, 64), "labels": torch.randint(0, 10, (samples,))}


def resnet(samples: int = 8) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    return ResNet(), {"pixel_values": torch.randn(samples, 3, 64, 64), "labels": torch.randint(0, 10, (samples,))}


def bert(samples: int = 4) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    config = BertConfig(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=2, intermediate_size=256, vocab_size=500
    )
    return BertForMaskedLM(config), tokens(samples)


def gpt2(samples: int = 4) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    config = GPT2Config(n_embd=64, n_layer=2, n_head=2, vocab_size=500, n_positions=64, bos_token_id=0, eos_token_id=0)
    config.loss_type = "ForCausalLM"
    return GPT2LMHeadModel(config), tokens(samples)


def tokens(samples: int, length: int = 32) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 500, (samples, length))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}


MODELS = {"perceptron": perceptron, "bert": bert, "gpt2": gpt2, "resnet": resnet}


def freeze_half(model: nn.Module) -> None:
    """Freezes the parameters that come first."""
    parameters = [*model.parameters()]
    for parameter in parameters[: len(parameters) // 2]:
        parameter.requires_grad_(False)


@contextlib.contextmanager
def without_onednn() -> Iterator[None]:
    """Has torch's own kernels compute, which are the same on all processors."""
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before)
