"""A training on a GPU that saves in every second step: `task.py DIRECTORY [no|fp16|bf16] [--compile]`."""

from __future__ import annotations

import os
import sys
import threading

import torch
from torch import nn

from trainer_kit import Trainer, TrainingArguments


class Net(nn.Module):
    """Convolutions, a batch norm, dropout and linear layers; returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Dropout(0.2), nn.Linear(288, 64),
            nn.ReLU(), nn.Linear(64, 3),
        )  # fmt: skip

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = self.layers(x)
        return nn.functional.cross_entropy(scores, labels), scores


def check_all_threads() -> None:
    """CUDA Sanitizer sees the thread that imports torch, and not those that copy and save."""
    from torch.cuda._sanitizer import cuda_sanitizer

    run = threading.Thread.run

    def checked(thread: threading.Thread) -> None:
        with cuda_sanitizer.dispatch:
            run(thread)

    threading.Thread.run = checked  # type: ignore[method-assign]


def main() -> None:
    if "TORCH_CUDA_SANITIZER" in os.environ:
        check_all_threads()
    folder, mode = sys.argv[1], sys.argv[2]
    generator = torch.Generator().manual_seed(0)
    data = [{"x": torch.randn(1, 8, 8, generator=generator), "labels": torch.tensor(index % 3)} for index in range(96)]
    args = TrainingArguments(
        output_dir=folder, max_steps=16, per_device_train_batch_size=8, gradient_accumulation_steps=2, save_steps=2,
        save_strategy="steps", learning_rate=0.01, mixed_precision=mode, torch_compile="--compile" in sys.argv,
        report_to="none", disable_tqdm=True, log_level="error",
    )  # fmt: skip
    torch.backends.cudnn.deterministic = True
    Trainer(Net(), args, data).train()


if __name__ == "__main__":
    main()
