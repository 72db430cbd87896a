"""`print_summary`: the lines of the classic guide, with the figures of the training."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from trainer_kit import Trainer, TrainingArguments, TrainOutput, print_summary

TIMES = {"train_runtime": 57.8249, "train_samples_per_second": 8.8554}


@pytest.mark.parametrize(
    ("memory", "lines"),
    [
        (
            {"device_memory_gib": 14.5986328125, "reserved_memory_gib": 14.0, "peak_memory_gib": 12.0},
            ["GPU memory occupied: 14949 MiB", "Peak GPU memory: 12288 MiB"],
        ),
        (
            {"reserved_memory_gib": 14.0, "peak_memory_gib": 12.5},
            ["GPU memory occupied: 14336 MiB", "Peak GPU memory: 12800 MiB"],
        ),
        ({"memory_gib": 0.25, "peak_memory_gib": 0.5}, ["Peak memory: 512 MiB"]),
        ({"memory_gib": "not reported by this device", "peak_memory_gib": "not reported by this device"}, []),
    ],
    ids=["with NVML", "without NVML", "process", "not reported"],
)
def test_the_lines(memory: dict[str, Any], lines: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    print_summary(TrainOutput(512, 0.1, TIMES | memory))
    assert capsys.readouterr().out.splitlines() == ["Time: 57.82", "Samples/second: 8.86", *lines]


def test_a_result_prints_as_one_line() -> None:
    metrics = {**TIMES, "peak_memory_gib": 0.51, "seconds/forward": 12.5}
    assert str(TrainOutput(1512, 0.123456, metrics)) == (
        "TrainOutput(global_step=1512, training_loss=0.1235, 58 s, 8.9 samples/s, peak memory 522.2 MiB; "
        "4 values in .metrics)"
    )
    unknown = TrainOutput(0, float("nan"), {"peak_memory_gib": "not reported by this device"})
    assert repr(unknown) == "TrainOutput(global_step=0, training_loss=nan; 1 values in .metrics)"


def test_of_a_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    samples = [{"x": torch.ones(2), "labels": torch.ones(1)}] * 8
    args = TrainingArguments(
        output_dir=str(tmp_path), num_train_epochs=1, use_cpu=True, report_to="none", save_strategy="no"
    )

    def loss(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return (model(batch["x"]) - batch["labels"]).square().mean()

    result = Trainer(torch.nn.Linear(2, 1), args, samples, compute_loss=loss).train()
    capsys.readouterr()
    print_summary(result)
    shown = re.fullmatch(r"Time: (.+)\nSamples/second: (.+)\nPeak memory: (\d+) MiB\n", capsys.readouterr().out)
    assert shown is not None
    seconds, rate, peak = map(float, shown.groups())
    assert seconds == round(result.metrics["train_runtime"], 2)
    assert rate == round(8 / result.metrics["train_runtime"], 2)
    assert peak > 50  # a process that has imported torch


@pytest.mark.parametrize("wrong", [None, {"loss": 1.0}, TrainOutput(0, 0.0, {})])
def test_something_else_is_refused(wrong: Any) -> None:
    with pytest.raises(TypeError, match=r"print_summary got a \w+; give what Trainer.train\(\) returned"):
        print_summary(wrong)
