from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from trainer_kit import Trainer, TrainingArguments


class Net(nn.Module):
    def __init__(self, kind: str = "linear") -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3) if kind == "linear" else nn.Conv1d(1, 3, 4)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        out = self.layer(x if isinstance(self.layer, nn.Linear) else x[:, None])
        logits = out if out.ndim == 2 else out[..., 0]
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def said(tmp_path: Path, model: nn.Module, x: Any, labels: Any, **given: Any) -> str:
    args = TrainingArguments(
        output_dir=str(tmp_path), max_steps=1, use_cpu=True, report_to="none", disable_tqdm=True, save_strategy="no",
        log_level="critical",
    )  # fmt: skip
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        Trainer(model, args, [{"x": x, "labels": labels}] * 8, **given).train()
    assert caught.value.__cause__ is not None
    return str(caught.value)


@pytest.mark.parametrize("kind", ["linear", "conv"])
@pytest.mark.parametrize(
    ("dtype", "remedy"),
    [(torch.float16, "mixed_precision='fp16'"), (torch.bfloat16, "='bf16'"), (torch.float64, "convert one of them")],
)
def test_weights_and_inputs_of_two_dtypes(tmp_path: Path, kind: str, dtype: torch.dtype, remedy: str) -> None:
    text = said(tmp_path, Net(kind).to(dtype), torch.randn(4), torch.tensor(1))
    name = str(dtype).removeprefix("torch.")
    assert f"the weights of Net are {name}, but the batch holds x (float32); " in text
    assert remedy in text


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.layer = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.layer(self.embedding(ids) + x), labels)


def test_a_column_of_tokens_is_not_blamed(tmp_path: Path) -> None:
    sample = {"x": torch.randn(4), "ids": torch.tensor(1), "labels": torch.tensor(1)}
    args = TrainingArguments(str(tmp_path), max_steps=1, use_cpu=True, report_to="none", log_level="critical")
    with pytest.raises(ValueError, match=r"the weights of Tokens are bfloat16, but the batch holds x \(float32\); "):
        Trainer(Tokens().bfloat16(), args, [sample] * 8).train()


def test_whole_numbers_as_inputs(tmp_path: Path) -> None:
    text = said(tmp_path, Net(), torch.ones(4, dtype=torch.int64), torch.tensor(1))
    assert "the weights of Net are float32, but the batch holds x (int64); convert one of them" in text


def test_labels_that_are_no_classes(tmp_path: Path) -> None:
    text = said(tmp_path, Net(), torch.randn(4), torch.tensor(1.0))
    assert "the labels are float32, but the loss of Net takes whole numbers (classes); give them as torch.int64" in text


def test_labels_that_are_no_floats(tmp_path: Path) -> None:
    def compute_loss(model: Any, batch: Any) -> torch.Tensor:
        return F.binary_cross_entropy_with_logits(model.layer(batch["x"])[:, 0], batch["labels"])

    text = said(tmp_path, Net(), torch.randn(4), torch.tensor(1), compute_loss=compute_loss)
    assert "the labels are int64, but the loss of Net takes floating-point numbers; give labels.float()" in text


def test_other_errors_are_left_alone(tmp_path: Path) -> None:
    args = TrainingArguments(
        output_dir=str(tmp_path), max_steps=1, use_cpu=True, report_to="none", log_level="critical"
    )
    with pytest.raises(RuntimeError, match="mat1 and mat2 shapes cannot be multiplied"):
        Trainer(Net(), args, [{"x": torch.randn(5), "labels": torch.tensor(1)}] * 8).train()
