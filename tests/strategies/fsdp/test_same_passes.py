"""Processes that call other units, or use other parameters, are refused before the weights change."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.ranks import on_ranks
from torch import nn

from trainer_kit import FSDP, Trainer, TrainingArguments


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other, self.both = (nn.Linear(4, 4, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor, choice: int) -> torch.Tensor:
        return x + self.both(x) + (self.one(x) if choice == 0 else self.other(x) if choice == 1 else 0)


class Choosing(nn.Module):
    """A model whose path depends on the rank: it skips a block, or uses another weight of each."""

    def __init__(self, chooses: str) -> None:
        super().__init__()
        self.chooses = chooses
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        choice = int(os.environ["RANK"])
        for number, block in enumerate(self.blocks):
            if self.chooses != "unit" or number != choice:
                x = block(x, {"parameter": choice, "no": 2}.get(self.chooses, 0))
        return {"loss": x.square().mean()}


def train(folder: str, chooses: str, evaluates: bool) -> tuple[str, bool]:
    """The refusal, and whether the weights are those from before the step."""
    torch.manual_seed(0)
    args = TrainingArguments(
        output_dir=folder, use_cpu=True, report_to="none", save_strategy="no", disable_tqdm=True, log_level="critical",
        max_steps=2, per_device_train_batch_size=1, per_device_eval_batch_size=1, gradient_accumulation_steps=2,
    )  # fmt: skip
    samples = [{"x": torch.full((4,), float(index))} for index in range(8)]
    trainer = Trainer(Choosing(chooses), args, samples, samples[:2], strategy=FSDP(device="cpu"))
    before = [each.detach().clone() for each in trainer.run.model.parameters()]
    run: Any = trainer.evaluate if evaluates else trainer.train
    with pytest.raises(ValueError, match="processes") as refusal:
        run()
    now = [each.full_tensor() for each in trainer.run.model.parameters()]
    return str(refusal.value), all(torch.equal(*pair) for pair in zip(before, now, strict=True))


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("chooses", "evaluates", "sentence"),
    [
        ("unit", False, "processes called different units of the model: rank 0 'blocks."),
        ("unit", True, "processes called different units of the model: rank 0 'blocks."),
        ("parameter", False, "had a part in the loss on some processes only (rank 0 and rank 1 differ)"),
    ],
)
def test_other_passes_are_refused_on_all_processes(
    tmp_path: Path, chooses: str, evaluates: bool, sentence: str
) -> None:
    for text, is_unchanged in on_ranks(2, train, str(tmp_path), chooses, evaluates):
        assert sentence in text
        assert is_unchanged


def train_unused(folder: str) -> list[bool]:
    torch.manual_seed(0)
    args = TrainingArguments(output_dir=folder, use_cpu=True, report_to="none", save_strategy="no", disable_tqdm=True,
                             log_level="critical", max_steps=2, weight_decay=0.1, learning_rate=0.1)  # fmt: skip
    samples = [{"x": torch.full((4,), float(index))} for index in range(8)]
    trainer = Trainer(Choosing("no"), args, samples, strategy=FSDP(device="cpu"))
    before = {name: each.detach().clone() for name, each in trainer.run.model.named_parameters()}
    trainer.train()
    return [torch.equal(before[name], each.full_tensor()) for name, each in trainer.run.model.named_parameters()]


@pytest.mark.distributed
def test_a_parameter_that_no_process_uses_keeps_its_value(tmp_path: Path) -> None:
    """Also with weight decay, as on a single device."""
    for unchanged in on_ranks(2, train_unused, str(tmp_path)):
        assert unchanged == [True, True, False] * 3
