"""FSDP on transformers' architectures: the gradients and weights of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from kit.architectures import ARCHITECTURES, VOCABULARY
from kit.ranks import on_ranks
from kit.token_training import whole
from torch import nn

from trainer_kit import Callback, Run, Trainer, TrainingArguments
from trainer_kit.callbacks import Freezing

FLOAT64 = {"bert", "modernbert", "t5"}
"""Architectures that compute in float64 throughout; others compute their losses or norms in float32."""


def texts(name: str) -> list[dict[str, torch.Tensor]]:
    """Texts of which some count for nothing, in a number that leaves a rank without samples."""
    generator = torch.Generator().manual_seed(3)
    rows = [torch.randint(1, VOCABULARY, (8,), generator=generator) for _ in range(5)]
    return [
        {"input_ids": row, "labels": row.where(torch.arange(8) < 8 - 2 * index, -100)} for index, row in enumerate(rows)
    ]


def make(name: str) -> nn.Module:
    torch.manual_seed(0)
    model = ARCHITECTURES[name]()
    if "mixtral" not in name:  # whose experts take no float64
        model.double()
    for module in model.modules():  # a dropout's seed depends on the layout
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        elif isinstance(getattr(module, "dropout", None), float):
            module.dropout = 0.0
    return model


class Gradients(Callback):
    """The gradients of each step by name, before they are clipped."""

    def __init__(self) -> None:
        self.seen: list[dict[str, torch.Tensor]] = []

    def on_pre_optimizer_step(self, run: Run) -> None:
        named = run.model.named_parameters()
        self.seen.append({name: whole(each.grad).clone() for name, each in named if each.grad is not None})


def train(folder: str, name: str, batch_size: int, options: dict[str, Any], frozen: tuple[str, ...] = ()) -> Any:
    model, gradients = make(name), Gradients()
    args = TrainingArguments(
        output_dir=folder, use_cpu=True, report_to="none", disable_tqdm=True, log_level="error", save_strategy="no",
        num_train_epochs=1, per_device_train_batch_size=batch_size, gradient_accumulation_steps=2, optim="sgd",
        learning_rate=0.1, **options,
    )  # fmt: skip
    callbacks = [gradients, *([Freezing(frozen)] if frozen else [])]
    trainer = Trainer(model, args, texts(name), texts(name)[:3], callbacks=callbacks)
    trainer.train()
    weights = {key: whole(each).detach().clone() for key, each in trainer.run.model.state_dict().items()}
    return weights, gradients.seen, trainer.evaluate()["eval_loss"], type(trainer.run.model).__name__


@pytest.mark.distributed
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_gradients_and_weights_are_those_of_one_process(tmp_path: Path, name: str) -> None:
    """A factor of any parameter's gradient would show; some gradients are 0 but for rounding."""
    expected, theirs, loss, _ = train(str(tmp_path), name, 2, {})
    exactness = 1e-12 if name in FLOAT64 else 1e-6
    for weights, ours, eval_loss, kind in on_ranks(2, train, str(tmp_path), name, 1, {"strategy": "fsdp"}):
        assert kind.startswith("FSDP")
        assert eval_loss == pytest.approx(loss, abs=1e-6)
        for mine, other in zip(ours, theirs, strict=True):
            largest = max(float(each.abs().max()) for each in other.values())
            assert mine.keys() == other.keys()
            for key, gradient in other.items():
                most = exactness * max(float(gradient.abs().max()), largest / 100)
                torch.testing.assert_close(mine[key], gradient, rtol=0, atol=most, msg=key)
        for key, weight in expected.items():
            torch.testing.assert_close(weights[key], weight, rtol=0, atol=exactness, msg=key)


@pytest.mark.distributed
@pytest.mark.parametrize("name", ["gpt2", "llama-tied"])
def test_recomputed_activations_and_frozen_layers(tmp_path: Path, name: str) -> None:
    frozen = ("transformer.h.0.*",) if name == "gpt2" else ("model.layers.0.*",)
    options = {"gradient_checkpointing": True}
    expected, *_ = train(str(tmp_path), name, 2, options, frozen)
    for weights, *_ in on_ranks(2, train, str(tmp_path), name, 1, options | {"strategy": "fsdp"}, frozen):
        for key, weight in expected.items():
            torch.testing.assert_close(weights[key], weight, rtol=0, atol=1e-6, msg=key)


def train_bf16(folder: str, batch_size: int, strategy: str) -> tuple[float, set[torch.dtype]]:
    torch.manual_seed(0)
    args = TrainingArguments(
        output_dir=folder, use_cpu=True, strategy=strategy, report_to="none", disable_tqdm=True, log_level="error",
        save_strategy="no", max_steps=4, per_device_train_batch_size=batch_size, mixed_precision="bf16",
        learning_rate=1e-2, lr_scheduler_type="constant",
    )  # fmt: skip
    trainer = Trainer(ARCHITECTURES["llama"](), args, texts("llama") * 2)
    output = trainer.train()
    states = [value for state in trainer.run.optimizer.state.values() for value in state.values()]
    return output.training_loss, {each.dtype for each in [*trainer.run.model.parameters(), *states]}


@pytest.mark.distributed
def test_bf16_is_close_to_one_process_and_keeps_float32_weights(tmp_path: Path) -> None:
    expected, dtypes = train_bf16(str(tmp_path), 4, "single")
    for loss, found in on_ranks(2, train_bf16, str(tmp_path), 2, "fsdp"):
        assert loss == pytest.approx(expected, rel=1e-2)
        assert found == dtypes == {torch.float32}
