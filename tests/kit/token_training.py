"""A token model in float64 and its training, whose gradients tests compare between strategies."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from trainer_kit import Callback, Run, Trainer, TrainingArguments
from trainer_kit.strategies.ddp import DDP
from trainer_kit.strategies.fsdp.strategy import FSDP


class Tokens(nn.Module):
    """A token model in float64 whose loss is the mean over the labels that count, as transformers has it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.hidden = nn.Linear(6, 6)
        self.head = nn.Linear(6, 11)
        self.double()

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        logits = self.head(torch.tanh(self.hidden(self.embedding(input_ids))))
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def texts(length: int) -> list[dict[str, torch.Tensor]]:
    """Texts of many lengths; some count for nothing at all."""
    generator = torch.Generator().manual_seed(3)
    rows = [torch.randint(0, 11, (1 + 3 * index % 7,), generator=generator) for index in range(length)]
    return [
        {
            "input_ids": row,
            "attention_mask": torch.ones_like(row),
            "labels": torch.full_like(row, -100) if index % 4 == 2 else row.where(row > 1, -100),
        }
        for index, row in enumerate(rows)
    ]


def padded(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {
        name: nn.utils.rnn.pad_sequence([sample[name] for sample in samples], batch_first=True, padding_value=fill)
        for name, fill in (("input_ids", 0), ("attention_mask", 0), ("labels", -100))
    }


def summed(model: nn.Module, batch: Any) -> Any:
    logits = model(**batch)["logits"].flatten(0, 1)
    labels = batch["labels"].flatten()
    return nn.functional.cross_entropy(logits, labels, reduction="sum"), int((labels != -100).sum())


def summed_on_the_device(model: nn.Module, batch: Any) -> Any:
    total, _ = summed(model, batch)
    return total, (batch["labels"] != -100).sum()


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


class Gradients(Callback):
    def __init__(self) -> None:
        self.seen: list[np.ndarray] = []

    def on_pre_optimizer_step(self, run: Run) -> None:
        flat = [whole(parameter.grad).flatten() for parameter in run.model.parameters() if parameter.grad is not None]
        self.seen.append(torch.cat(flat).numpy(force=True).copy())


def train_tokens(
    folder: str, samples: int, batch_size: int, accumulation: int, kind: str, strategy: Any = None, **options: Any
) -> dict[str, Any]:
    torch.manual_seed(0)
    losses = {"mean": None, "pair": summed, "pair on the device": summed_on_the_device}
    gradients = Gradients()
    args = TrainingArguments(
        output_dir=folder, num_train_epochs=2, per_device_train_batch_size=batch_size, use_cpu=True,
        gradient_accumulation_steps=accumulation, learning_rate=0.1, optim="sgd", report_to="none",
        disable_tqdm=True, log_level="error", save_strategy="no", logging_steps=1,
    )  # fmt: skip
    strategy = (FSDP if strategy == "fsdp" else DDP)(device="cpu", **options) if options or strategy else None
    trainer = Trainer(
        Tokens(), args, texts(samples), data_collator=padded, callbacks=[gradients], compute_loss=losses[kind],
        strategy=strategy,
    )  # fmt: skip
    output = trainer.train()
    state, weights = trainer.run.state, [whole(each).flatten() for each in trainer.run.model.parameters()]
    return {
        "gradients": gradients.seen, "loss": output.training_loss, "steps": state.step, "samples": state.samples,
        "tokens": state.tokens, "weights": torch.cat(weights).detach(),
    }  # fmt: skip
