"""The model card states what codecarbon measured."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import torch
import yaml
from kit.trainer import arguments

from trainer_kit import Trainer
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
    data = [{"x": torch.randn(4), "labels": i % 2} for i in range(32)]
    folder = tmp_path / "run"
    folder.mkdir()
    trainer = Trainer(Net(), arguments(tmp_path, report_to=["jsonl"]), data)
    for steps in (2, 4):
        trainer.args.max_steps = steps
        with codecarbon.OfflineEmissionsTracker(
            output_dir=str(folder), country_iso_code="FRA", log_level="critical", allow_multiple_runs=True
        ):
            trainer.train()
    with (folder / "emissions.csv").open(encoding="utf-8") as file:
        kilograms = [float(row["emissions"]) for row in csv.DictReader(file)]
    assert len(kilograms) == 2
    card = model_card(folder)
    metadata = yaml.safe_load(card.split("---\n")[1])
    assert metadata["co2_eq_emissions"]["source"] == "codecarbon"
    assert metadata["co2_eq_emissions"]["emissions"] == pytest.approx(1000 * sum(kilograms), rel=1e-3)
