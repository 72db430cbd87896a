"""Two ranks, each on a simulated GPU of its own, with gloo in the place of nccl."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.fake_cuda import Gpus, fake_cuda
from kit.ranks import on_ranks
from torch import nn
from torch.torch_version import TorchVersion

from trainer_kit import DDP, Callback, Run, Trainer, TrainingArguments
from trainer_kit.strategies.process_collectives import ProcessCollectives

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.skipif(
        TorchVersion(torch.__version__) < "2.12", reason="DDP's buckets would not be on the simulated GPU"
    ),
]


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).double()

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.layers(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def points(length: int = 48) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(length, 4, generator=generator, dtype=torch.float64)
    return [{"x": row, "labels": torch.tensor(index % 3)} for index, row in enumerate(rows)]


class StepWaits(Callback):
    """Counts the main thread's waits from the beginning of the second step to the end of the last one."""

    def __init__(self, gpus: Gpus) -> None:
        self.gpus = gpus
        self.begin = 0
        self.waits: list[str] = []

    def on_step_begin(self, run: Run) -> None:
        if run.state.step == 1:
            self.begin = len(self.gpus.waits)

    def on_step_end(self, run: Run) -> None:
        if run.state.step == run.total_steps:
            self.waits = [str(wait) for wait in self.gpus.waits[self.begin :] if wait.thread == "MainThread"]


def train(folder: str, resume: bool = False, **changes: Any) -> dict[str, Any]:
    """Train on this rank's GPU; return its weights, device, races and waits."""
    values: dict[str, Any] = {
        "output_dir": folder, "max_steps": 6, "per_device_train_batch_size": 4, "learning_rate": 0.05,
        "lr_scheduler_type": "constant", "logging_steps": 100, "save_strategy": "no", "report_to": "none",
        "disable_tqdm": True, "log_level": "error",
    }  # fmt: skip
    with fake_cuda(2) as gpus:
        model, waits = Classifier(), StepWaits(gpus)
        trainer = Trainer(
            model, TrainingArguments(**(values | changes)), points(), points(9), callbacks=[waits], strategy=DDP()
        )
        trainer.train(resume_from_checkpoint=resume or None)
        return {
            "weights": [parameter.detach().cpu().clone() for parameter in model.parameters()],
            "device": str(trainer.run.strategy.device),
            "races": gpus.races,
            "waits": waits.waits,
            "peak": [pool.peak for pool in gpus.pools],
        }


WAYS: dict[str, dict[str, Any]] = {
    "accumulation": {"gradient_accumulation_steps": 2},
    "bf16": {"mixed_precision": "bf16"},
    "fp16": {"mixed_precision": "fp16"},
    "found batch size": {"auto_find_batch_size": True, "gradient_accumulation_steps": 2},
    "saves and evaluation": {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 3},
}


def test_two_ranks_train_as_one(tmp_path: Path) -> None:
    first, second = on_ranks(2, train, str(tmp_path / "two"))
    assert (first["device"], second["device"]) == ("cuda:0", "cuda:1")
    assert first["peak"][0] == second["peak"][1] > first["peak"][1] == second["peak"][0] == 0
    assert first["races"] == second["races"] == []
    assert first["waits"] == second["waits"] == []
    (alone,) = on_ranks(1, train, str(tmp_path / "one"), per_device_train_batch_size=8)
    for own, other, whole in zip(first["weights"], second["weights"], alone["weights"], strict=True):
        assert torch.equal(own, other)
        torch.testing.assert_close(own, whole, rtol=0, atol=1e-12)


@pytest.mark.parametrize("way", WAYS)
def test_only_a_save_or_an_evaluation_waits(tmp_path: Path, way: str) -> None:
    for rank in on_ranks(2, train, str(tmp_path), **WAYS[way]):
        assert rank["races"] == []
        assert bool(rank["waits"]) is ("saves" in way)


def test_two_ranks_resume(tmp_path: Path) -> None:
    saves = {"save_strategy": "steps", "save_steps": 2}
    whole = on_ranks(2, train, str(tmp_path / "whole"), **saves)
    on_ranks(2, train, str(tmp_path / "parts"), **saves, max_steps=4)
    resumed = on_ranks(2, train, str(tmp_path / "parts"), resume=True, **saves)
    for one, other in zip(whole, resumed, strict=True):
        assert all(torch.equal(*pair) for pair in zip(one["weights"], other["weights"], strict=True))
        assert other["races"] == []


def count_on_gpus(folder: str) -> list[str]:
    """Sum the counts of each step on the GPUs, which the host waits for."""

    def all_reduce_ints(self: ProcessCollectives, numbers: Sequence[int]) -> list[int]:
        return [int(number) for number in self.all_reduce(torch.tensor([*numbers], device="cuda")).tolist()]

    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(ProcessCollectives, "all_reduce_ints", all_reduce_ints)
        waits: list[str] = train(folder)["waits"]
        return waits


def test_a_rank_that_waits_is_seen(tmp_path: Path) -> None:
    assert all(on_ranks(2, count_on_gpus, str(tmp_path)))
