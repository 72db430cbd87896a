from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from trainer_kit import Accelerator, Trainer, TrainingArguments
from trainer_kit.data.workers import packed, unpacked
from trainer_kit.errors import DataError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are stopped")


class Stopping:
    """Its worker 1 stops, or sleeps, at the ninth sample that it reads."""

    def __init__(self, sleeps: bool = False) -> None:
        self.sleeps = sleeps
        self.reads = 0

    def read(self, index: int) -> dict[str, torch.Tensor]:
        info = get_worker_info()
        assert info is not None
        self.reads += 1
        if info.id == 1 and self.reads == 9:
            if self.sleeps:
                time.sleep(60)
            os.kill(os.getpid(), signal.SIGSTOP)
        return {"x": torch.tensor([float(index)])}


class Map(Stopping):
    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return self.read(index)


class Stream(IterableDataset[Any], Stopping):
    def __init__(self, sleeps: bool = False) -> None:
        Stopping.__init__(self, sleeps)

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return (self.read(index) for index in range(1000))


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).square().mean()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dataset", "why"),
    [
        (Map(), r"is stopped \(by SIGSTOP\)"),
        (Stream(), r"is stopped \(by SIGSTOP\)"),
        (Map(sleeps=True), "hangs or is slow in the dataset or collator"),
    ],
    ids=["map", "stream", "hangs"],
)
def test_a_worker_that_gives_no_batch_is_named(tmp_path: Path, dataset: Any, why: str) -> None:
    args = TrainingArguments(
        output_dir=str(tmp_path), max_steps=50, per_device_train_batch_size=2, dataloader_num_workers=2, use_cpu=True,
        dataloader_timeout=1.5, report_to="none", disable_tqdm=True, save_strategy="no", log_level="critical",
    )  # fmt: skip
    begin, others = time.monotonic(), {*multiprocessing.active_children()}
    one = r"no batch came within dataloader_timeout=1.5 seconds: DataLoader worker 1 \(process \d+\) "
    with pytest.raises(DataError, match=one + why):
        Trainer(Model(), args, dataset).train()
    assert time.monotonic() - begin < 60
    assert others.issuperset(multiprocessing.active_children())  # ended, though the error is still held
    (crash,) = tmp_path.glob("crash-*")
    assert "has ended or hangs" in (crash / "state" / "report.json").read_text()


@pytest.mark.slow
def test_an_accelerators_loader_names_it_too() -> None:
    loader = Accelerator(cpu=True).prepare(DataLoader(Map(), batch_size=2, num_workers=2, timeout=1.5))  # type: ignore[arg-type]
    with pytest.raises(DataError, match=r"within timeout=1.5 seconds: DataLoader worker 1 .* is stopped"):
        list(loader)


def test_packed_samples_are_the_same_without_the_memory_around_them() -> None:
    rows = torch.arange(1_000_000.0).view(100, -1)
    shared = torch.ones(3)
    samples = [{"x": rows[3, :5], "label": 3, "text": "three"}, [shared, shared], rows[4, 2].bfloat16()]
    data = packed(samples)
    assert len(data) < 5_000
    found = unpacked(data)
    assert torch.equal(found[0].pop("x"), rows[3, :5])
    assert found[0] == {"label": 3, "text": "three"}
    assert found[1][0] is found[1][1]
    assert torch.equal(found[2], samples[2])
