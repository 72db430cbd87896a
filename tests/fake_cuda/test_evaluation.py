"""Evaluations on a simulated GPU: what is done while it works, and what they keep on it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kit.fake_cuda import Gpus, fake_cuda
from torch import nn

from trainer_kit import Trainer, TrainingArguments
from trainer_kit.strategies import single


class Timeline:
    """The time at which the host is, and until which the device works; a batch takes one unit of each."""

    def __init__(self, gpus: Gpus, patches: pytest.MonkeyPatch) -> None:
        self.now = self.busy_until = 0
        wait = gpus.wait
        patches.setattr(gpus, "wait", lambda *args: (self.wait(), wait(*args)))

    def read(self) -> None:
        self.now += 1

    def compute(self) -> None:
        self.busy_until = max(self.now, self.busy_until) + 1

    def wait(self) -> None:
        self.now = max(self.now, self.busy_until)


class Slow:
    """A dataset that takes time for each batch of two samples."""

    def __init__(self, timeline: Timeline | None = None) -> None:
        self.timeline = timeline

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if self.timeline is not None and index % 2 == 0:
            self.timeline.read()
        return {"x": torch.full((4,), index / 40), "labels": torch.tensor(index % 3)}


class Head(nn.Module):
    def __init__(self, timeline: Timeline | None = None, classes: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, classes)
        self.timeline = timeline

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        if self.timeline is not None:
            self.timeline.compute()
        logits = self.layer(x.to(self.layer.weight.dtype))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class Draws:
    """A metric that draws random numbers, as a bootstrap does."""

    def reset(self) -> None:
        self.drawn: list[float] = []

    def update(self, predictions: torch.Tensor, labels: torch.Tensor) -> None:
        self.drawn += [float(predictions.sum()), torch.rand(1).item(), np.random.rand()]

    def compute(self) -> float:
        return sum(place * value for place, value in enumerate(self.drawn))


def make(folder: Path, model: nn.Module, data: Any = None, **options: Any) -> Trainer:
    changes = options.pop("args", {})
    args = TrainingArguments(
        output_dir=str(folder), per_device_eval_batch_size=2, report_to="none", disable_tqdm=True, log_level="error",
        **changes,
    )  # fmt: skip
    return Trainer(model, args, eval_dataset=data or Slow(), **options)


def test_batches_are_read_while_the_device_works(gpus: Gpus, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """20 batches, each a unit of the host's time and of the device's: 40 one after the other."""
    timeline = Timeline(gpus, monkeypatch)
    trainer = make(tmp_path, Head(timeline), Slow(timeline))
    trainer.predict(Slow(timeline))
    assert timeline.now <= 20 + 3


@pytest.mark.parametrize("workers", [0, 1])
def test_figures_are_those_of_the_cpu(tmp_path: Path, workers: int) -> None:
    def evaluated(use_cpu: bool) -> tuple[dict[str, Any], Any]:
        args = {"use_cpu": use_cpu, "dataloader_num_workers": workers}
        trainer = make(tmp_path, Head(), metrics={"draws": Draws()}, args=args)
        output = trainer.predict(Slow())
        times = ("runtime", "per_second")
        return {name: each for name, each in output.metrics.items() if not name.endswith(times)}, output.predictions

    with fake_cuda() as gpus:
        metrics, predictions = evaluated(use_cpu=False)
    assert gpus.races == []
    expected, values = evaluated(use_cpu=True)
    assert metrics == expected
    assert np.array_equal(predictions, values)


def test_logits_are_widened_on_the_host(gpus: Gpus, tmp_path: Path) -> None:
    """With 50,000 classes in bfloat16, the logits of a batch take 200 KB, and 400 KB more in float32."""
    trainer = make(tmp_path, Head(classes=50_000).bfloat16())
    peaks: list[int] = []
    trainer.run.model.register_forward_hook(lambda *_: peaks.append(gpus.pools[0].peak))
    output = trainer.predict(Slow())
    assert output.predictions.dtype == np.float32
    assert output.predictions.shape == (40, 50_000)
    assert gpus.pools[0].peak - peaks[0] < 20_000  # losses, and batches that are fetched ahead


def without_record(batch: Any, stream: torch.cuda.Stream) -> None:
    torch.cuda.current_stream().wait_stream(stream)


def without_order(batch: Any, stream: torch.cuda.Stream) -> None:
    for tensor in batch.values():
        tensor.record_stream(torch.cuda.current_stream())


@pytest.mark.parametrize(("hand_over", "race"), [(without_record, "freed"), (without_order, "read after a write")])
def test_races_of_batches_are_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, hand_over: Callable[..., None], race: str
) -> None:
    monkeypatch.setattr(single, "_hand_over", hand_over)
    with fake_cuda() as gpus:
        make(tmp_path, Head()).evaluate()
    assert any(race in each.what for each in gpus.races)
