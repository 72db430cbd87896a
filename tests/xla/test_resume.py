"""A run that ended on XLA goes on there bit for bit, and on a CPU with the same weights but for rounding."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from kit import xla_task
from kit.on_xla import on_cpu, on_xla, try_on_xla
from safetensors import safe_open

from trainer_kit import Callback, Run, Trainer, TrainingArguments
from trainer_kit.callbacks import EMA

pytestmark = pytest.mark.xla

STEPS = 8


class At(Callback):
    """Does something after a step."""

    def __init__(self, step: int, action: Callable[[Run], Any]) -> None:
        self.step = step
        self.action = action

    def on_step_end(self, run: Run) -> None:
        if run.state.step == self.step:
            self.action(run)


def killed(run: Run) -> None:
    while not any(Path(run.args.output_dir).glob("checkpoint-*")):
        time.sleep(0.01)  # it is still being written
    os.kill(os.getpid(), signal.SIGKILL)


def stopped(run: Run) -> None:
    run.requests.save = run.requests.stop = True


def make_trainer(folder: Path, task: str, strategy: str, **changes: Any) -> Trainer:
    often = {"save_strategy": "steps", "save_steps": 4, "eval_strategy": "steps", "eval_steps": 3}
    return xla_task.make_trainer(folder / task / strategy, task, xla_task.strategy(strategy), **(often | changes))


def tensors(checkpoint: Path) -> dict[str, bytes]:
    """The files of tensors of a checkpoint."""
    return {str(path.relative_to(checkpoint)): path.read_bytes() for path in checkpoint.rglob("*.safetensors")}


def train(folder: Path, tasks: list[tuple[str, str]], **changes: Any) -> list[list[float]]:
    """Trains each task with each strategy to its end, from the newest checkpoint; returns the logged losses."""
    for task, strategy in tasks:
        make_trainer(folder, task, strategy, **changes).train(resume_from_checkpoint=True)
    return [xla_task.losses(folder / task / strategy) for task, strategy in tasks]


@pytest.mark.parametrize(
    ("devices", "tasks"),
    [
        pytest.param(1, [("bert", "xla")], id="one device"),
        pytest.param(4, [("net", "xla"), ("bert", "fsdp")], id="four devices"),
    ],
)
def test_killed_and_resumed_ends_with_the_same_bits(tmp_path: Path, devices: int, tasks: list[tuple[str, str]]) -> None:
    def kill(task: str, strategy: str) -> None:
        make_trainer(tmp_path / "killed", task, strategy, dropout=0.3, callbacks=[At(7, killed)]).train()

    expected = on_xla(devices, lambda: train(tmp_path / "straight", tasks, dropout=0.3))
    for task, strategy in tasks:
        ended = try_on_xla(devices, kill, task, strategy)
        assert ended.code == -signal.SIGKILL, ended.error
        assert sorted(path.name for path in (tmp_path / "killed" / task / strategy).glob("checkpoint-*")) == [
            "checkpoint-4"
        ]
    found = on_xla(devices, lambda: train(tmp_path / "killed", tasks, dropout=0.3))
    assert found == expected
    for task, strategy in tasks:
        place = Path(task, strategy, f"checkpoint-{STEPS}")
        straight, resumed = tensors(tmp_path / "straight" / place), tensors(tmp_path / "killed" / place)
        assert len(straight) == 2  # weights, optimizer
        assert resumed.keys() == straight.keys()
        assert [name for name in straight if resumed[name] != straight[name]] == []


def test_checkpoints_of_xla_and_of_a_cpu_are_the_same_thing(tmp_path: Path) -> None:
    def begin(strategy: str) -> None:
        make_trainer(tmp_path / "begun", "gpt2", strategy, callbacks=[At(4, stopped)]).train()

    def go_on(first: str, second: str) -> None:
        checkpoint = tmp_path / "begun" / "gpt2" / first / "checkpoint-4"
        trainer = make_trainer(tmp_path / f"begun by {first}", "gpt2", second)
        assert trainer.train(resume_from_checkpoint=checkpoint).global_step == STEPS

    def on_the_cpu() -> None:
        train(tmp_path / "straight", [("gpt2", "cpu")])
        begin("cpu")

    on_cpu(on_the_cpu)
    on_xla(4, lambda: [begin(strategy) for strategy in ("xla", "fsdp")])
    begun = tmp_path / "begun" / "gpt2"
    for name in ("xla", "fsdp"):
        assert files(begun / name / "checkpoint-4") == files(begun / "cpu" / "checkpoint-4")
        assert keys(begun / name / "checkpoint-4") == keys(begun / "cpu" / "checkpoint-4")
    on_cpu(lambda: [go_on(first, "cpu") for first in ("xla", "fsdp")])
    on_xla(4, lambda: [go_on("cpu", second) for second in ("xla", "fsdp")])
    expected = weights(tmp_path / "straight" / "gpt2" / "cpu")
    assert ("lm_head.weight" in expected) + ("transformer.wte.weight" in expected) == 1  # tied: stored once
    for first, second in (("xla", "cpu"), ("fsdp", "cpu"), ("cpu", "xla"), ("cpu", "fsdp")):
        found = weights(tmp_path / f"begun by {first}" / "gpt2" / second)
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            message = f"{first} to {second}, {name}"
            torch.testing.assert_close(found[name], value, rtol=0, atol=1e-5, msg=message)


def files(checkpoint: Path) -> list[str]:
    return sorted(str(path.relative_to(checkpoint)) for path in checkpoint.rglob("*"))


def keys(checkpoint: Path) -> dict[str, list[str]]:
    """The names in each file of tensors."""
    found = {}
    for path in checkpoint.rglob("*.safetensors"):
        with safe_open(path, "pt") as file:
            found[path.name] = sorted(file.keys())
    return found


def weights(folder: Path) -> dict[str, torch.Tensor]:
    with safe_open(folder / f"checkpoint-{STEPS}" / "model.safetensors", "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # no mapping


class Line(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(3, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": (self.linear(x)[:, 0] - labels).square().mean()}


def test_going_back_with_averages_of_the_weights(tmp_path: Path) -> None:
    """It saves before the first step, and takes the averages back to where the weights are."""

    def go_back() -> tuple[int, bool]:
        samples = [{"x": torch.ones(3) * index, "labels": torch.tensor(1.0)} for index in range(32)]
        samples[13]["x"][0] = torch.inf
        args = TrainingArguments(
            output_dir=str(tmp_path), num_train_epochs=1, per_device_train_batch_size=4, optim="sgd",
            learning_rate=1e-3, logging_steps=1, save_steps=3, report_to="none", disable_tqdm=True,
            log_level="error", nonfinite="rollback", strategy="xla",
        )  # fmt: skip
        average = EMA(decay=0.9)
        trainer = Trainer(Line(), args, samples, callbacks=[average])
        trainer.train()
        finite = all(bool(value.isfinite().all()) for value in average.state_dict()["averages"].values())
        return trainer.run.state.rollbacks, finite

    assert on_xla(1, go_back) == (1, True)
