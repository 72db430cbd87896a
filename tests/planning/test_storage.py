"""The size of checkpoints that a plan tells is that of those that are written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from scenarios.task import Net, make_trainer
from torch import nn

from trainer_kit import Trainer
from trainer_kit.callbacks import PeerCopies
from trainer_kit.planning.storage import optimizer_bytes
from trainer_kit.utils.units import format_size

pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")

TEXT = 20_000
"""Bytes of JSON beside the tensors of a checkpoint, at the most: manifest, arguments, names."""


class Wide(Net):
    """The task's model with enough weights that text is nothing beside them, some in half precision, one not used."""

    def __init__(self) -> None:
        super().__init__()
        self.second.weight = self.first.weight
        self.table = nn.Embedding(500, 64)
        self.coarse = nn.Linear(100, 300).bfloat16()
        self.frozen = nn.Linear(200, 200).requires_grad_(False)
        self.unused = nn.Linear(300, 100)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        output = super().forward(x, labels)
        more = self.table.weight.square().mean() + self.coarse.weight.float().mean() + self.coarse.bias.float().mean()
        return {"loss": output["loss"] + more, "logits": output["logits"]}


class Kept:
    """Something of the user's in every checkpoint."""

    def state_dict(self) -> dict[str, Any]:
        return {"table": torch.zeros(30_000)}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@pytest.mark.parametrize("optim", ["adamw_torch", "sgd", "adafactor", "muon", "schedule_free_adamw"])
def test_a_checkpoint_is_as_large_as_planned(tmp_path: Path, optim: str) -> None:
    if optim.startswith("schedule_free"):
        pytest.importorskip("schedulefree")
    settings: dict[str, Any] = {
        "lr_scheduler_type": "constant_with_warmup",
        "max_steps": 2,
        "save_steps": 2,
        "async_save": False,
    }
    trainer = make_trainer(tmp_path, model=Wide(), optim=optim, **settings)
    trainer.run.stateful["kept"] = Kept()
    storage = trainer.plan().storage
    assert storage is not None
    trainer.train()
    files = [path for path in (tmp_path / "checkpoint-2").rglob("*") if path.is_file()]
    written = sum(path.stat().st_size for path in files)
    assert 0 <= written - storage.size < TEXT
    assert storage.parts["kept"] == 4 * 30_000
    assert storage.size == sum(storage.parts.values())
    assert storage.copies_folder is None
    weights = sum(
        each.nbytes for each in {id(t): t for t in trainer.run.model.state_dict(keep_vars=True).values()}.values()
    )
    assert storage.parts["weights"] == weights
    averages = trainer.events.callbacks[0].state_dict()["averages"]
    assert storage.parts["callbacks"] == sum(each.nbytes for each in averages.values())
    again = trainer.plan().storage
    assert again is not None
    assert again.parts["callbacks"] == storage.parts["callbacks"]


def test_copies_in_memory_are_told(tmp_path: Path) -> None:
    plan = make_trainer(tmp_path / "run", PeerCopies(2, tmp_path), max_steps=8).plan()
    assert plan.storage is not None
    size = format_size(2 * plan.storage.size)
    text = " ".join(str(plan).split())
    assert f"{size} on all machines together, twice that if there are several" in text


OPTIMIZERS: list[Callable[[Any], torch.optim.Optimizer]] = [
    lambda weights: torch.optim.AdamW(weights, fused=True),
    lambda weights: torch.optim.Adam(weights, amsgrad=True, foreach=True),
    lambda weights: torch.optim.SGD(weights, lr=0.1, momentum=0.9),
    lambda weights: torch.optim.Adafactor(weights),
    lambda weights: torch.optim.Adagrad(weights),
    lambda weights: torch.optim.RMSprop(weights, centered=True, momentum=0.1),
]


@pytest.mark.parametrize("make", OPTIMIZERS)
def test_an_optimizers_state(make: Callable[[Any], torch.optim.Optimizer]) -> None:
    model = nn.Sequential(nn.Linear(30, 20), nn.LayerNorm(20), nn.Linear(20, 20), nn.Linear(20, 5))
    model[2].requires_grad_(False)
    weights = [*model.parameters()]
    optimizer = make([{"params": weights[:3]}, {"params": weights[3:]}])
    torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)  # puts a step of its own into the optimizer
    calls: list[Any] = []
    optimizer.register_step_pre_hook(lambda *given: calls.append(given))
    before = {name: repr(value) for name, value in vars(optimizer).items()}
    planned = optimizer_bytes(optimizer, model, without_gradient=())
    assert {name: repr(value) for name, value in vars(optimizer).items()} == before
    assert not calls
    model(torch.randn(2, 30)).sum().backward()
    optimizer.step()
    kept = [value for weight in weights if weight.requires_grad for value in optimizer.state[weight].values()]
    assert planned == sum(value.nbytes for value in kept if isinstance(value, torch.Tensor))


class OnlyOnGpus(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        raise RuntimeError("a kernel that is not there")


def test_an_optimizer_that_cannot_be_tried(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    trainer.optimizer = OnlyOnGpus(trainer.run.model.parameters(), lr=0.1)
    plan = trainer.plan()
    assert plan.storage is not None
    assert "optimizer" not in plan.storage.parts
    assert plan.storage.unknown == "the state of OnlyOnGpus (RuntimeError: a kernel that is not there)"
    assert "and the state of OnlyOnGpus" in " ".join(str(plan).split())


def test_a_disk_that_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Usage:
        free = 10_000

    asked: list[Path] = []

    def usage(path: Path) -> Any:
        asked.append(path)
        return Usage

    monkeypatch.setattr("trainer_kit.planning.storage.shutil.disk_usage", usage)
    plan = make_trainer(tmp_path / "not" / "there", save_total_limit=3).plan()
    assert asked == [tmp_path]
    assert plan.storage is not None
    assert plan.storage.free == 10_000
    sentence = "the disk has no room for 4 checkpoints: set a smaller save_total_limit, or another output_dir"
    assert (sentence in plan.warnings) == (plan.storage.size * 4 > 10_000)


def test_a_state_that_cannot_be_saved(tmp_path: Path) -> None:
    trainer: Trainer = make_trainer(tmp_path)
    trainer.run.stateful["odd"] = Kept()
    trainer.run.stateful["odd"].state_dict = lambda: {"a function": print}  # type: ignore[method-assign]
    plan = trainer.plan()
    assert plan.storage is None
    (problem,) = plan.problems
    assert "the state 'odd' cannot be saved" in problem
