"""Arguments from Hydra's composed configurations."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from trainer_kit import TrainingArguments

hydra = pytest.importorskip("hydra")
pytestmark = pytest.mark.ecosystem


@dataclasses.dataclass
class Config:
    trainer: TrainingArguments = dataclasses.field(default_factory=TrainingArguments)
    width: int = 8


def test_a_composed_configuration(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("trainer:\n  learning_rate: 1e-3\n  eval_strategy: 'no'\nwidth: 16\n")
    with hydra.initialize_config_dir(str(tmp_path), version_base=None):
        config = hydra.compose("run", overrides=["trainer.learning_rate=3e-4", "+trainer.bf16=true"])
    assert TrainingArguments(**config.trainer) == TrainingArguments(learning_rate=3e-4, mixed_precision="bf16")


def test_a_structured_configuration() -> None:
    from hydra.core.config_store import ConfigStore

    ConfigStore.instance().store(name="trainer_kit_run", node=Config)
    with hydra.initialize(config_path=None, version_base=None):
        config = hydra.compose("trainer_kit_run", overrides=["trainer.learning_rate=3e-4", "trainer.seed=7", "width=3"])
    assert TrainingArguments(**config.trainer) == TrainingArguments(learning_rate=3e-4, seed=7)


def test_instantiate() -> None:
    from hydra.utils import instantiate

    config = {"_target_": "trainer_kit.TrainingArguments", "learning_rate": 3e-4, "report_to": ["jsonl"]}
    assert instantiate(config) == TrainingArguments(learning_rate=3e-4, report_to=["jsonl"])
