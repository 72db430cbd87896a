"""Trainings on a real GPU: what a simulated one is blind to. `scripts/gpu-check` runs these tests."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.ranks import on_ranks
from torch import nn

from trainer_kit import DDP, FSDP, Callback, Run, Strategy, Trainer, TrainingArguments

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
TASK = str(Path(__file__).with_name("task.py"))


def execute(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | environment
    return subprocess.run([sys.executable, *words], env=env, capture_output=True, text=True, timeout=280, check=False)


class Classifier(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Dropout(0.1), nn.Linear(width, 3))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = self.layers(x)
        return nn.functional.cross_entropy(scores, labels), scores


def points(length: int = 96) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(length, 4, generator=generator)
    return [{"x": row, "labels": torch.tensor(index % 3)} for index, row in enumerate(rows)]


def make(
    folder: Path | str,
    *callbacks: Callback,
    model: nn.Module | None = None,
    data: Any = None,
    strategy: Strategy | None = None,
    **changes: Any,
) -> Trainer:
    values: dict[str, Any] = {
        "output_dir": str(folder), "max_steps": 8, "per_device_train_batch_size": 8, "learning_rate": 0.05,
        "logging_steps": 1, "save_strategy": "no", "report_to": "none", "disable_tqdm": True, "log_level": "error",
    }  # fmt: skip
    args = TrainingArguments(**(values | changes))
    return Trainer(model or Classifier(), args, data or points(), callbacks=callbacks, strategy=strategy)


class Losses(Callback):
    """Keeps the logged losses."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_log(self, run: Run, record: dict[str, Any]) -> None:
        if "loss" in record:
            self.losses.append(record["loss"])


def losses(folder: Path | str, resume: bool = False, **options: Any) -> list[float]:
    """Train, and return the loss of each step."""
    callback = Losses()
    make(folder, callback, **options).train(resume_from_checkpoint=resume or None)
    assert callback.losses
    return callback.losses


@pytest.mark.scenario
@pytest.mark.parametrize("words", [["no"], ["fp16"], ["bf16"], ["bf16", "--compile"]], ids=" ".join)
def test_a_killed_training_resumes_with_the_same_bits(tmp_path: Path, words: list[str]) -> None:
    """Saves are asynchronous: the copies run on a stream of their own."""
    done = execute("-m", "trainer_kit", "verify", "--steps", "12", "--seed", "1", TASK, "--", str(tmp_path), *words)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("bitwise equal")


@pytest.mark.scenario
@pytest.mark.parametrize("mode", ["no", "fp16"])
def test_cuda_sanitizer_finds_no_race(tmp_path: Path, mode: str) -> None:
    done = execute(TASK, str(tmp_path), mode, TORCH_CUDA_SANITIZER="1")
    assert done.returncode == 0, done.stderr
    assert "CSAN" not in done.stderr
    assert len([*tmp_path.glob("checkpoint-*")]) > 0


class Hungry(Classifier):
    """Keeps 16 MiB a sample for the backward pass."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        kept = x.repeat(1, 2**20).exp()
        return super().forward(x + (kept.sin() * 0).sum(1, keepdim=True), labels)


def test_a_step_that_does_not_fit_is_repeated(tmp_path: Path) -> None:
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_allocated() + 2**29) / total)
    try:
        trainer = make(tmp_path, model=Hungry(), per_device_train_batch_size=64, auto_find_batch_size=True)
        trainer.train()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert trainer.run.state.samples == 8 * 64
    assert trainer.run.state.micro_batch is not None
    assert trainer.run.state.micro_batch < 64


class Slow(Classifier):
    """Works for some time on the device in its forward pass, which the host does not wait for."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        torch.cuda._sleep(100_000_000)
        return super().forward(x, labels)


def test_time_on_the_device_counts_where_it_was_asked_for(tmp_path: Path) -> None:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    torch.cuda._sleep(100_000_000)
    end.record()
    end.synchronize()
    seconds = begin.elapsed_time(end) / 1e3
    metrics = make(tmp_path, model=Slow(), logging_steps=100).train().metrics
    assert metrics["seconds/forward"] == pytest.approx(8 * seconds, rel=0.3)


class StopAt(Callback):
    def on_step_end(self, run: Run) -> None:
        run.requests.stop = run.requests.stop or run.state.step == 5


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [True, {"mode": "reduce-overhead"}], ids=["default", "CUDA graphs"])
def test_a_compiled_training(tmp_path: Path, compiled: Any) -> None:
    """Inductor draws other numbers for dropout, so that only a model without it has the losses of eager mode."""
    model, plain = Classifier(), Classifier()
    model.layers[2], plain.layers[2] = nn.Identity(), nn.Identity()
    found = losses(tmp_path / "compiled", model=model, torch_compile=compiled)
    assert found == pytest.approx(losses(tmp_path / "eager", model=plain), rel=1e-4)


@pytest.mark.slow
def test_cuda_graphs_draw_from_the_seeds_of_their_steps(tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "torch_compile": {"mode": "reduce-overhead"}, "save_strategy": "steps", "save_steps": 4,
    }  # fmt: skip
    whole = losses(tmp_path / "whole", **options)
    make(tmp_path / "parts", StopAt(), **options).train()
    resumed = losses(tmp_path / "parts", resume=True, **options)
    assert len(resumed) in (3, 4)  # after the checkpoint of step 4 or 5
    assert resumed == whole[-len(resumed) :]


def losses_of(folder: str, kind: type[DDP] | None) -> list[float]:
    model = Classifier().double()
    model.layers[2] = nn.Identity()
    data = [{"x": row["x"].double(), "labels": row["labels"]} for row in points()]
    strategy = None if kind is None else kind()
    size = 8 if kind is None else 4
    return losses(folder, model=model, data=data, strategy=strategy, per_device_train_batch_size=size)


@pytest.mark.distributed
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs")
@pytest.mark.parametrize("kind", [DDP, FSDP])
def test_two_cards_train_as_one(tmp_path: Path, kind: type[DDP]) -> None:
    one = losses_of(str(tmp_path / "one"), None)
    two = on_ranks(2, losses_of, str(tmp_path / "two"), kind)
    assert two[0] == pytest.approx(one, rel=1e-9)
