"""The strategies of docs/en/how-to/strategies.md train, on one process and on two, and the page names what there is."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.guides import Guide
from kit.ranks import on_ranks

from trainer_kit import SingleDevice, Strategy, Trainer, TrainingArguments
from trainer_kit.strategies.collectives import Collectives
from trainer_kit.strategies.device_info import DeviceInfo
from trainer_kit.strategies.session import Session
from trainer_kit.strategies.sharding import Sharding

GUIDE = Guide("docs/en/how-to/strategies.md")
METHODS, SHARDED, FOR_ACCELERATOR = (
    re.findall(r"^\| (`.*?) \|", GUIDE.text.partition(f"## {title}")[2].partition("\n## ")[0], re.MULTILINE)
    for title in ("The methods", "Sharded models", "For the Accelerator")
)
SHORT = {"rank", "world_size", "is_main", "gather", "barrier", "scales_gradients"}


def names() -> dict[str, Any]:
    """What the page's blocks of Python define."""
    found: dict[str, Any] = {"__name__": "page"}
    for block in GUIDE.python:
        exec(block, found)
    return found


class Regression(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(4, 1).double()
        self.unused = torch.nn.Linear(1, 1).double()

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": (self.layer(x).squeeze(-1) - y).square().mean()}


def rows() -> list[dict[str, torch.Tensor]]:
    torch.manual_seed(1)
    return [{"x": torch.randn(4).double(), "y": torch.randn(()).double()} for _ in range(64)]


def weights_on(folder: str, batch_size: int, is_toy: bool, resume: str | None = None) -> torch.Tensor:
    """The weights after four steps of 16 samples in two micro-batches."""
    args = TrainingArguments(
        folder, max_steps=4, per_device_train_batch_size=batch_size, gradient_accumulation_steps=2, learning_rate=0.1,
        max_grad_norm=0.5, save_steps=2, save_strategy="steps", report_to="none", disable_tqdm=True,
    )  # fmt: skip
    strategy = names()["PlainDDP"](device="cpu") if is_toy else SingleDevice("cpu")
    trainer = Trainer(Regression(), args, rows(), strategy=strategy)
    trainer.train(resume_from_checkpoint=resume)
    return trainer.run.model.layer.weight.detach().clone()  # type: ignore[union-attr]


def test_the_strategy_trains_as_one_process_does(tmp_path: Path) -> None:
    alone = weights_on(str(tmp_path / "alone"), 8, is_toy=False)
    one = weights_on(str(tmp_path / "one"), 8, is_toy=True)
    two = on_ranks(2, weights_on, str(tmp_path / "two"), 4, is_toy=True)
    assert torch.equal(alone, one)
    assert torch.equal(two[0], two[1])
    torch.testing.assert_close(two[0], alone, rtol=1e-12, atol=1e-12)


def test_another_strategy_resumes_its_checkpoint(tmp_path: Path) -> None:
    alone = weights_on(str(tmp_path / "alone"), 8, is_toy=False)
    on_ranks(2, weights_on, str(tmp_path / "two"), 4, is_toy=True)
    checkpoint = str(tmp_path / "two" / "checkpoint-2")
    resumed = weights_on(str(tmp_path / "resumed"), 8, is_toy=False, resume=checkpoint)
    torch.testing.assert_close(resumed, alone, rtol=1e-12, atol=1e-12)


def test_the_blocks_run_as_they_stand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = names()
    assert found["train"](Regression(), rows(), str(tmp_path)).run.state.step == 4
    monkeypatch.setattr(DeviceInfo, "free_memory", lambda self: 2**40)
    assert found["LimitedCPU"]().device_info.free_memory() == 2**30


def test_the_page_names_each_method_once() -> None:
    ordinary, sharded, others = (
        [name for cell in cells for name in re.findall(r"`(\w+)`", cell)]
        for cells in (METHODS, SHARDED, FOR_ACCELERATOR)
    )
    public = {name for name, _ in inspect.getmembers(Strategy, callable) if not name.startswith("_")}
    assert sorted(ordinary + sharded + others) == sorted(public - SHORT)
    assert len(ordinary) <= 26


def test_the_page_names_the_parts() -> None:
    strategy = Strategy()
    parts = {"device_info": DeviceInfo, "collectives": Collectives, "session": Session, "sharding": Sharding}
    for attribute, kind in parts.items():
        assert type(getattr(strategy, attribute)) is kind
        assert f"| `{attribute}` | `{'/'.join(kind.__module__.split('.')[1:])}.py: {kind.__name__}` |" in GUIDE.text
