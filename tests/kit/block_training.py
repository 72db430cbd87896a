"""A model of repeated blocks in float64 and its training, which tests compare between FSDP and other strategies."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from trainer_kit import Callback, Run, Trainer, TrainingArguments


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Blocks(nn.Module):
    """Blocks between an embedding and a head that classifies each row; a shard of the head has uneven rows."""

    def __init__(self, width: int = 6, blocks: int = 3, classes: int = 5) -> None:
        super().__init__()
        self.embedding = nn.Linear(4, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.head = nn.Linear(width, classes)
        self.double()

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        outputs = {"logits": logits}
        return outputs if labels is None else {"loss": nn.functional.cross_entropy(logits, labels), **outputs}


def rows(count: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        {"x": torch.randn(4, generator=generator).double(), "labels": torch.tensor(index % 5)} for index in range(count)
    ]


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def whole_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """All weights and buffers, gathered. Collective."""
    return {name: whole(value) for name, value in model.state_dict().items()}


def arguments(folder: str, strategy: str, **options: Any) -> TrainingArguments:
    """Two epochs of 13 rows in global batches of 8, the last of which is short."""
    settings = {
        "output_dir": folder, "strategy": strategy, "use_cpu": True, "report_to": "none", "disable_tqdm": True,
        "log_level": "error", "save_strategy": "no", "num_train_epochs": 2, "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2, "per_device_eval_batch_size": 2, "learning_rate": 1e-2, "logging_steps": 1,
    }  # fmt: skip
    return TrainingArguments(**{**settings, **options})


def make_trainer(
    folder: str, strategy: str, callbacks: Iterable[Callback] = (), model: nn.Module | None = None,
    samples: int = 13, given: dict[str, Any] | None = None, **options: Any,
) -> Trainer:  # fmt: skip
    """Makes a Trainer of `Blocks`; `given` has further arguments of the Trainer, `options` are TrainingArguments."""
    torch.manual_seed(0)
    model = Blocks() if model is None else model
    args = arguments(folder, strategy, **options)
    return Trainer(model, args, rows(samples), rows(5), callbacks=callbacks, **given or {})


class Records(Callback):
    """Keeps the records and the evaluations of a training."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []
        self.evaluated: list[dict[str, Any]] = []

    def on_log(self, run: Run, record: dict[str, Any]) -> None:
        self.seen.append(dict(record))

    def on_evaluate(self, run: Run, metrics: dict[str, Any]) -> None:
        self.evaluated.append(dict(metrics))
