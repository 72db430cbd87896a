"""A plan leaves no trace: the training after it has the same bits as one without it."""

from __future__ import annotations

import collections
import copy
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scenarios.task import Net, Noisy, Stream, digest, make_trainer
from torch.utils.data import IterableDataset

from trainer_kit import Trainer
from trainer_kit.checkpoint.format.manifest import REPLACED_PREFIX


class Drawing(Noisy):
    """A dataset with a generator of its own, which each sample moves on."""

    def __init__(self) -> None:
        super().__init__()
        self.own = np.random.default_rng(0)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": self.x[index] + self.own.random(), "labels": self.labels[index]}


class Counting(IterableDataset[Any]):
    """An iterable dataset without a state that is another one each time it is read."""

    def __init__(self) -> None:
        self.times = 0

    def __len__(self) -> int:
        return 40

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        self.times += 1
        for place in range(40):
            yield {"x": torch.full((8,), place + self.times / 10), "labels": torch.tensor(place % 3)}


class Remembering(Net):
    """A model that keeps something beside its weights, and computes with it."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        self.calls += 1
        return super().forward(x + self.calls / 100, labels)


class Bare(torch.optim.Optimizer):
    """Does not call torch's `__init__()`, so that it lacks the hooks that torch's own optimizers call."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.defaults = {"lr": 0.1}
        self.state = collections.defaultdict(dict)
        self.param_groups = [{"params": [*model.parameters()], "lr": 0.1}]

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                parameter -= self.param_groups[0]["lr"] * parameter.grad


CASES: list[dict[str, Any]] = [
    {"nonfinite": "rollback"},
    {"dataset": Drawing(), "model": Remembering()},
    {"dataset": Stream(), "max_steps": 9},
    {"dataset": Counting(), "dataloader_num_workers": 0},
    {"mixed_precision": "bf16", "metric_for_best_model": "accuracy", "model": Remembering()},
]


def generators() -> tuple[Any, ...]:
    return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()  # type: ignore[index]


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("changes", CASES, ids=["usual", "memories", "stream", "no state", "tried"])
def test_a_training_has_the_same_bits_after_a_plan(tmp_path: Path, changes: dict[str, Any]) -> None:
    planned, plain = (made(tmp_path / name, copy.deepcopy(changes)) for name in ("planned", "plain"))
    before = generators()
    plan = planned.plan()
    assert generators() == before
    assert not (tmp_path / "planned").exists()
    assert planned.run.optimizer is None
    assert planned.run.state.step == planned.run.total_steps == 0
    assert plan.problems == ()
    for trainer in (planned, plain):
        trainer.train()
    assert plan.steps.last == planned.run.state.step
    assert digest(planned) == digest(plain)


def made(folder: Path, changes: dict[str, Any]) -> Trainer:
    trainer = make_trainer(folder, **changes)
    if "metric_for_best_model" in changes:
        trainer.compute_metrics = lambda prediction: {"accuracy": float(np.mean(prediction.label_ids == 0))}
    return trainer


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_an_optimizer_without_hooks_steps_after_a_plan(tmp_path: Path) -> None:
    weights = []
    for name in ("planned", "plain"):
        trainer = make_trainer(tmp_path / name, save_strategy="no", max_steps=3)
        model = trainer.run.model
        trainer.optimizer = Bare(model)
        step = Bare.step
        if name == "planned":
            plan = trainer.plan()
            assert plan.problems == ()
            assert plan.memory.parts["weights"] > 0
            assert Bare.step is step
        trainer.train()
        weights.append(torch.cat([each.detach().flatten() for each in model.parameters()]))
    assert torch.equal(*weights)


def test_an_optimizer_that_cannot_be_saved_is_a_problem_of_the_plan(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    trainer.optimizer = Bare(trainer.run.model)
    with pytest.raises(ValueError, match=r"Bare.state_dict\(\) failed") as refusal:
        trainer.train()
    assert trainer.plan().problems == (str(refusal.value),)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_plan_of_a_resume_changes_no_file(tmp_path: Path) -> None:
    make_trainer(tmp_path, max_steps=8, save_steps=4).train()
    (tmp_path / "checkpoint-8" / "manifest.json").write_text("{")
    # As a killed process leaves it, for the next training to put back.
    shutil.copytree(tmp_path / "checkpoint-4", tmp_path / f"{REPLACED_PREFIX}checkpoint-6")
    files = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    plan = make_trainer(tmp_path, max_steps=8).plan(resume_from_checkpoint=True)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == files
    assert plan.start.checkpoint == str(tmp_path / "checkpoint-4")
    assert any("checkpoint-8 is skipped" in warning for warning in plan.warnings)


@pytest.mark.slow
@pytest.mark.gpu
@pytest.mark.usefixtures("cuda")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("moved", [False, True])
def test_a_training_on_a_gpu_has_the_same_bits_after_a_plan(tmp_path: Path, moved: bool) -> None:
    digests = []
    for name in ("planned", "plain"):
        trainer = make_trainer(tmp_path / name, use_cpu=False, metric_for_best_model="accuracy")
        trainer.compute_metrics = lambda prediction: {"accuracy": 0.5}
        if moved:
            trainer.run.model.cuda()
        if name == "planned":
            before = torch.cuda.get_rng_state().tolist()
            plan = trainer.plan()
            assert torch.cuda.get_rng_state().tolist() == before
            assert plan.hardware.device == "cuda:0"
            assert plan.memory.available == torch.cuda.get_device_properties(0).total_memory
            assert plan.memory.parts["runtime"] > 0
        trainer.train()
        digests.append(digest(trainer))
    assert digests[0] == digests[1]
