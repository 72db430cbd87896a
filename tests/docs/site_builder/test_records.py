"""The page of records has each field of a real run, with its unit."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from site_builder.records import Field, fields, records, sources

from trainer_kit import Trainer, TrainingArguments, log_mean
from trainer_kit.callbacks import read_log

OF_LOG = {"event", "time", "step"}
OWN = {"twice", "eval_twice", "eval_hits"}
"""What this run logs and computes itself."""


class Model(torch.nn.Module):
    """Logs a mean of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 2)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.layer(x)
        loss = torch.nn.functional.cross_entropy(logits, labels)
        log_mean("twice", 2 * loss)
        return {"loss": loss, "logits": logits}


def listed() -> list[re.Pattern[str]]:
    """Patterns of all fields of the page."""
    names = [name for _, _, found in sources() for field in found for name in field.names]
    patterns = [re.escape(name).replace("PREFIX", "(eval|test)").replace("ACTIVITY", ".+") for name in names]
    return [re.compile(pattern) for pattern in patterns if pattern != "NAME" and not pattern.endswith("_NAME")]


def unlisted(names: set[str]) -> set[str]:
    return {name for name in names - OWN if not any(pattern.fullmatch(name) for pattern in listed())}


def test_each_field_of_a_run_is_listed(tmp_path: Path) -> None:
    args = TrainingArguments(
        output_dir=str(tmp_path), max_steps=4, per_device_train_batch_size=2, logging_steps=2, eval_strategy="steps",
        report_to=["jsonl"], disable_tqdm=True, use_cpu=True, save_strategy="no",
    )  # fmt: skip
    samples = [{"x": torch.ones(1), "labels": 1} for _ in range(8)]

    def hits(prediction: Any) -> dict[str, float]:
        return {"hits": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}

    trainer = Trainer(Model(), args, samples, samples, compute_metrics=hits)
    result = trainer.train()
    trainer.predict(samples)
    lines = list(read_log(tmp_path / "log.jsonl"))
    events = {line["event"] for line in lines}
    assert {"start", "log", "evaluate", "end"} <= events
    logged = {name for line in lines if line["event"] in ("log", "evaluate") for name in line} - OF_LOG
    assert {"loss", "learning_rate", "samples_per_second", "eval_loss", "twice", "eval_hits"} <= logged
    assert unlisted(logged) == set()
    assert unlisted({*result.metrics}) == set()
    page = records()
    assert [event for event in events if f'"{event}"' not in page] == []


def test_a_field_that_is_not_listed_is_noticed() -> None:
    assert unlisted({"loss", "seconds/forward", "test_runtime", "loudness"}) == {"loudness"}


def test_fields_are_read_from_docstrings() -> None:
    def thing() -> None:
        """Make records.

        - `a`, `b/c` (GiB): What it
          means.
        - `d`: no field.
        """

    assert fields(thing) == [Field(("a", "b/c"), "GiB", "What it means.")]


@pytest.mark.parametrize("title", [title for title, _, _ in sources()])
def test_each_source_has_fields(title: str) -> None:
    assert next(found for name, _, found in sources() if name == title)
