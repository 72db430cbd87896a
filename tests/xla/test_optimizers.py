"""Optimizers on XLA: the same steps as on a CPU, in one graph whatever the learning rate."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from kit import xla_task
from kit.on_xla import on_cpu, on_xla

pytestmark = pytest.mark.xla

RATES = [1e-3, 2e-3, 0.0, 1e-8, 0.1, 1.0, 1e-6, 5e-7, 0.0, 0.9, 1e-3, 1e-3, 1e-3, 1e-3]
"""Among them all numbers that a step computes with: 0, 1, epsilon, weight decay, beta, what clipping adds."""

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1.0, betas=(0.9, 0.5), weight_decay=0.1),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=1.0, betas=(0.9, 0.5), weight_decay=0.1),
    "decoupled": lambda parameters: torch.optim.Adam(
        parameters, lr=1.0, betas=(0.9, 0.5), weight_decay=0.1, decoupled_weight_decay=True
    ),
    "capturable": lambda parameters: torch.optim.AdamW(parameters, lr=1.0, betas=(0.9, 0.5), capturable=True),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1.0, momentum=0.9, weight_decay=0.1),
}


def train(folder: Path, kind: str, dtype: torch.dtype) -> dict[str, tuple[Any, list[int], int]]:
    """For each optimizer: the weights, what was compiled after each step, and how often its hook was called."""
    found = {}
    for name, make in OPTIMIZERS.items():
        hooks: list[None] = []
        watch = xla_task.Watch(xla_task.compiled if kind == "xla" else lambda: 0)
        trainer = xla_task.make_trainer(
            folder / kind / name, strategy=xla_task.strategy(kind), samples=56, callbacks=[watch],
            gradient_accumulation_steps=1, trainer={"lr_scheduler": schedule},
        )  # fmt: skip
        trainer.run.model.to(dtype)
        trainer.run.train_dataset.x = trainer.run.train_dataset.x.to(dtype)
        trainer.optimizer = make(trainer.run.model.parameters())
        if name == "capturable":  # which torch refuses on a CPU
            trainer.optimizer.param_groups[0]["capturable"] = kind == "xla"
        trainer.optimizer.register_step_post_hook(lambda *_, hooks=hooks: hooks.append(None))
        trainer.train()
        found[name] = xla_task.weights(trainer), watch.seen, len(hooks)
    return found


def schedule(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: RATES[min(step, len(RATES) - 1)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_step_is_the_same_whatever_its_numbers(tmp_path: Path, dtype: torch.dtype) -> None:
    expected, found = on_cpu(train, tmp_path, "cpu", dtype), on_xla(1, train, tmp_path, "xla", dtype)
    for name, (weights, compiled, hooks) in found.items():
        assert hooks == len(compiled) == 14, name
        assert compiled[1:] == [compiled[1]] * 13, name  # the first two steps only: then it has a state
        for key, value in expected[name][0].items():
            torch.testing.assert_close(weights[key], value, rtol=2e-5, atol=2e-5, msg=f"{name} {key}")


def test_bfloat16(tmp_path: Path) -> None:
    def downcast() -> tuple[list[float], set[torch.dtype]]:
        xla_task.make_trainer(tmp_path / "down", strategy=xla_task.XLA(downcast_bf16=True), adam_epsilon=1e-8).train()
        trainer = xla_task.make_trainer(tmp_path / "again", strategy=xla_task.XLA(downcast_bf16=True))
        trainer.evaluate()  # which prepares the model, as train() does once more
        trainer.train()
        return xla_task.losses(tmp_path / "down"), {value.dtype for value in xla_task.weights(trainer).values()}

    for name, (weights, compiled, _) in on_xla(1, train, tmp_path, "xla", torch.bfloat16).items():
        assert compiled[1:] == [compiled[1]] * 13, name
        assert all(value.isfinite().all() and value.dtype == torch.bfloat16 for value in weights.values()), name
    losses, dtypes = on_xla(1, downcast)
    assert all(0 < loss < 2 for loss in losses)
    assert dtypes == {torch.bfloat16}
