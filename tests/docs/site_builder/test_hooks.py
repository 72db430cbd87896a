"""The hooks stand in the order in which a real run calls them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from site_builder.hooks import callbacks_page

from trainer_kit import Callback, Trainer, TrainingArguments
from trainer_kit.callback import HOOKS

WITHOUT_A_PLACE = {"on_predict", "on_rollback", "on_regroup", "on_exception"}
"""Hooks that this run does not call."""


class Recorder(Callback):
    """Notes each hook when it is first called."""

    def __init__(self) -> None:
        self.called: list[str] = []


def _noting(hook: str) -> Any:
    def note(self: Recorder, run: Any, *arguments: Any) -> None:
        if hook not in self.called:
            self.called.append(hook)

    return note


for _hook in HOOKS:
    setattr(Recorder, _hook, _noting(_hook))


def test_the_order_is_that_of_a_real_run(tmp_path: Path) -> None:
    recorder = Recorder()
    args = TrainingArguments(
        output_dir=str(tmp_path), max_steps=2, per_device_train_batch_size=2, gradient_accumulation_steps=2,
        logging_strategy="epoch", eval_strategy="epoch", save_strategy="epoch", report_to="none", disable_tqdm=True,
        use_cpu=True, async_save=False,
    )  # fmt: skip
    samples = [{"x": torch.ones(1), "labels": 1} for _ in range(4)]

    def loss(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(model(batch["x"]), batch["labels"])

    Trainer(torch.nn.Linear(1, 2), args, samples, samples, compute_loss=loss, callbacks=[recorder]).train()
    in_run = [hook for hook in listed() if hook not in WITHOUT_A_PLACE]
    assert recorder.called == in_run


def listed() -> list[str]:
    """The hooks in the order of the page."""
    return re.findall(r"^\| \[`(on_\w+)`\]", callbacks_page(), re.MULTILINE)


def test_all_hooks_are_listed() -> None:
    assert listed() == list(HOOKS)
