"""Trained under XLA: the weights that a CPU gives, on any number of devices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from kit import xla_task
from kit.on_xla import on_cpu, on_xla

pytestmark = pytest.mark.xla

Weights = dict[str, torch.Tensor]


def trained(folder: Path, task: str, strategy: str, **changes: Any) -> Weights:
    trainer = xla_task.make_trainer(folder / task / strategy, task, xla_task.strategy(strategy), **changes)
    output = trainer.train()
    assert output.global_step == 8
    return xla_task.weights(trainer)


def all_trained(folder: Path, *strategies: str) -> dict[tuple[str, str], Weights]:
    return {(task, strategy): trained(folder, task, strategy) for task in xla_task.TASKS for strategy in strategies}


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Weights]:
    folder = tmp_path_factory.mktemp("cpu")
    return {task: weights for (task, _), weights in on_cpu(all_trained, folder, "cpu").items()}


@pytest.mark.parametrize("devices", [1, 2, 4])
def test_the_weights_are_those_of_a_cpu(tmp_path: Path, expected: dict[str, Weights], devices: int) -> None:
    # 50 samples in steps of 2 batches of 8: each epoch ends with a batch of 2.
    strategies = ["xla", "fsdp"] if devices == 4 else ["xla"]
    found = on_xla(devices, all_trained, tmp_path, *strategies)
    for (task, strategy), weights in found.items():
        assert weights.keys() == expected[task].keys(), (task, strategy)
        for name, value in expected[task].items():
            case = f"{task}, {strategy}, {name}: off by {(weights[name] - value).abs().max()}"
            torch.testing.assert_close(weights[name], value, rtol=0, atol=1e-5, msg=case)


def test_in_bf16_the_loss_is_reported_in_float32_and_close_to_that_of_float32(tmp_path: Path) -> None:
    def run(strategy: str, mixed_precision: str) -> tuple[list[float], str, str]:
        folder = tmp_path / strategy / mixed_precision
        trainer = xla_task.make_trainer(
            folder, "bert", xla_task.strategy(strategy), mixed_precision=mixed_precision, logging_steps=1
        )
        trainer.train()
        weight = next(trainer.run.model.parameters())
        return xla_task.losses(folder), str(trainer.run.local_loss.dtype), str(weight.dtype)

    found, loss, weight = on_xla(1, run, "xla", "bf16")
    assert (loss, weight) == ("torch.float32", "torch.float32")
    expected, _, _ = on_cpu(run, "cpu", "no")
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=0, atol=0.05)
    assert found != expected
