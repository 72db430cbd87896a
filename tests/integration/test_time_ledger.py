"""The ledger of real trainings that sleep where it is known: each sleep is found, and all adds up to the wall time."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

from trainer_kit import Callback, CallbackError, Run, Trainer, TrainingArguments
from trainer_kit.callbacks import read_log
from trainer_kit.checkpoint.save import Save

NAP = 0.02


class Rows(Dataset[Any]):
    """Each row takes a nap."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        time.sleep(NAP)
        return {"x": torch.ones(4), "labels": torch.tensor(index % 3)}


class Sleepy(torch.nn.Module):
    """Its forward pass takes a nap."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 3)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        if self.training:
            time.sleep(NAP)
        return {"loss": torch.nn.functional.cross_entropy(self.layer(x), labels)}


class Slow(Callback):
    """Takes a nap after each step, and notes when the last record came; ends training by an error where asked to."""

    priority = 1000

    def __init__(self, dies_at: int | None = None) -> None:
        self.dies_at = dies_at
        self.ended = 0.0

    def on_step_end(self, run: Run) -> None:
        time.sleep(NAP)
        if run.state.step == self.dies_at:
            raise RuntimeError("killed")

    def on_log(self, run: Run, record: dict[str, Any]) -> None:
        self.ended = time.perf_counter()

    def on_train_end(self, run: Run, metrics: dict[str, Any] | None) -> None:
        self.ended = time.perf_counter()


@pytest.fixture(autouse=True)
def _slow_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    write: Callable[..., Any] = Save.commit

    def slowly(*args: Any, **kwargs: Any) -> Any:
        time.sleep(5 * NAP)
        return write(*args, **kwargs)

    monkeypatch.setattr(Save, "commit", slowly)


def arguments(folder: Path) -> TrainingArguments:
    return TrainingArguments(
        output_dir=str(folder), max_steps=6, per_device_train_batch_size=2, logging_steps=2, save_steps=3,
        async_save=False, eval_strategy="steps", eval_steps=3, report_to="jsonl", disable_tqdm=True, use_cpu=True,
        log_level="error",
    )  # fmt: skip


def adds_up(total: float, wall: float) -> bool:
    """Within two per cent, and what lies between the test's own clock and the ledger's."""
    return total == pytest.approx(wall, rel=0.02, abs=0.02)


def test_each_sleep_is_found(tmp_path: Path) -> None:
    slow = Slow()
    trainer = Trainer(Sleepy(), arguments(tmp_path), Rows(30), Rows(4), callbacks=[slow])
    began = time.perf_counter()
    figures = trainer.train().metrics
    assert adds_up(figures["wall_seconds"], slow.ended - began)
    seconds = {name.removeprefix("seconds/"): each for name, each in figures.items() if name.startswith("seconds/")}
    assert adds_up(sum(seconds.values()), figures["wall_seconds"])
    least = {"data": 12, "forward": 6, "callback/Slow": 6, "evaluation": 2 * 4, "saving": 2 * 5}
    for name, naps in least.items():
        assert seconds[name] >= naps * NAP, name
    slept = sum(least.values()) * NAP
    assert all(own <= least.get(name, 0) * NAP + figures["wall_seconds"] - slept for name, own in seconds.items())
    records = [each for each in read_log(tmp_path / "log.jsonl") if "seconds/forward" in each]
    assert len(records) == 4  # with the last one, which has the sums
    for name in ("data", "forward"):
        assert sum(each[f"seconds/{name}"] for each in records[:3]) == pytest.approx(seconds[name], rel=0.02)
    assert all(0 < each["goodput"] < 1 for each in records)


@pytest.mark.parametrize("deaths", [1, 2])
def test_a_restart_finds_lost_work_and_the_time_it_was_down(tmp_path: Path, deaths: int) -> None:
    """Each time after the same checkpoint, which a file system may say is new."""
    began = 0.0
    for _ in range(deaths):
        trainer = Trainer(Sleepy(), arguments(tmp_path), Rows(30), Rows(4), callbacks=[Slow(dies_at=5)])
        began = began or time.perf_counter()  # no ledger knows how long the first Trainer took to be made
        with pytest.raises(CallbackError, match="killed"):
            trainer.train(True)
        time.sleep(15 * NAP)
        os.utime(tmp_path / "checkpoint-3")
    slow = Slow()
    figures = Trainer(Sleepy(), arguments(tmp_path), Rows(30), Rows(4), callbacks=[slow]).train(True).metrics
    # Two steps: two rows each, the forward pass and the callback.
    assert figures["seconds/lost"] >= deaths * 2 * 4 * NAP
    assert figures["seconds/down"] >= deaths * 15 * NAP
    assert adds_up(figures["wall_seconds"], slow.ended - began)
    for name, naps in {"data": 12, "forward": 6, "callback/Slow": 6, "evaluation": 2 * 4, "saving": 5}.items():
        assert figures[f"seconds/{name}"] >= naps * NAP, name  # those that led to where the run stands
