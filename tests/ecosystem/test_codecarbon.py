"""The model card states what codecarbon measured."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from kit.trainer import arguments
from transformers.integrations import CodeCarbonCallback

from trainer_kit import Trainer
from trainer_kit.callbacks import from_transformers
from trainer_kit.report.card import model_card

codecarbon = pytest.importorskip("codecarbon")

pytestmark = pytest.mark.ecosystem


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 2)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(self.layer(x), labels)


def test_the_card_states_the_emissions(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    trainer = Trainer(Net(), arguments(tmp_path, report_to=["jsonl"]), data())
    folder.mkdir()
    for steps in (2, 4):
        trainer.args.max_steps = steps
        with codecarbon.OfflineEmissionsTracker(
            output_dir=str(folder), country_iso_code="FRA", log_level="critical", allow_multiple_runs=True
        ):
            trainer.train()
    assert card_states(measured(folder, runs=2), folder)


@pytest.mark.filterwarnings("ignore")
def test_the_callback_of_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"LOG_LEVEL": "critical", "ALLOW_MULTIPLE_RUNS": "true", "FORCE_MODE_CPU_LOAD": "true"}.items():
        monkeypatch.setenv(f"CODECARBON_{name}", value)
    callback = from_transformers(CodeCarbonCallback)
    Trainer(Net(), arguments(tmp_path, report_to=["jsonl"]), data(), callbacks=[callback]).train()
    assert card_states(measured(tmp_path / "run", runs=1), tmp_path / "run")


def data() -> list[dict[str, Any]]:
    return [{"x": torch.randn(4), "labels": i % 2} for i in range(32)]


def measured(folder: Path, runs: int) -> float:
    """Return the sum of what codecarbon has measured in some runs, in kilograms."""
    with (folder / "emissions.csv").open(encoding="utf-8") as file:
        kilograms = [float(row["emissions"]) for row in csv.DictReader(file)]
    assert len(kilograms) == runs
    return sum(kilograms)


def card_states(kilograms: float, folder: Path) -> bool:
    metadata = yaml.safe_load(model_card(folder).split("---\n")[1])
    assert metadata["co2_eq_emissions"]["source"] == "codecarbon"
    return bool(metadata["co2_eq_emissions"]["emissions"] == pytest.approx(1000 * kilograms, rel=1e-3))
