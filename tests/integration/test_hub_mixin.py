"""A module with huggingface_hub's mixin keeps its own ways to be saved and loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import huggingface_hub
import torch
from kit.trainer import arguments

from trainer_kit import Trainer


class Net(torch.nn.Module, huggingface_hub.PyTorchModelHubMixin):  # type: ignore[misc]
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, width)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(self.layer(x), labels)


def test_it_is_saved_and_loaded_by_its_own_methods(tmp_path: Path) -> None:
    torch.manual_seed(0)
    data: list[dict[str, Any]] = [{"x": torch.randn(4), "labels": i % 2} for i in range(32)]
    net = Net(width=2)
    start = net.layer.weight.detach().clone()
    Trainer(net, arguments(tmp_path, learning_rate=0.1), data).train()
    net.save_pretrained(tmp_path / "final")
    loaded = Net.from_pretrained(tmp_path / "final")
    assert torch.equal(loaded.layer.weight, net.layer.weight)
    assert not torch.equal(loaded.layer.weight, start)
