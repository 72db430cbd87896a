"""Values of a Trainer's state; tests/checkpoint/test_integrity.py spoils them in checkpoints of real runs."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from scenarios.task import make_trainer

from trainer_kit.checkpoint import find_checkpoints
from trainer_kit.checkpoint.format.trainer_state import is_count, is_number, or_none, read_trainer, verify_training
from trainer_kit.errors import CheckpointError


@pytest.mark.parametrize(
    ("value", "counts", "is_finite"),
    [
        (0, True, True), (2**62 - 1, True, True), (2**62, False, True), (-1, False, True), (1.0, False, True),
        (True, False, False), ("1", False, False), (None, False, False), (math.inf, False, False),
        (math.nan, False, False),
    ],
)  # fmt: skip
def test_counts_and_numbers(value: Any, counts: bool, is_finite: bool) -> None:
    assert is_count(value) == counts
    assert is_number(value) == is_finite


def test_a_rule_may_allow_null() -> None:
    test, allowed = or_none((is_count, "a whole number"))
    assert [test(value) for value in (None, 1, -1)] == [True, True, False]
    assert allowed == "a whole number or null"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    make_trainer(folder, max_steps=4).train()
    return find_checkpoints(folder)[-1]


def test_what_a_run_saved_is_read_back(checkpoint: Path) -> None:
    trainer = verify_training(checkpoint)
    assert trainer == read_trainer(checkpoint)
    assert trainer["counters"]["step"] == 4
    assert trainer["run_id"]


def test_a_value_that_is_missing_or_impossible_is_named(checkpoint: Path, tmp_path: Path) -> None:
    state = tmp_path / "state"
    state.mkdir()
    (tmp_path / "manifest.json").write_bytes((checkpoint / "manifest.json").read_bytes())
    saved = json.loads((checkpoint / "state" / "trainer.json").read_text())
    for broken, name in ((saved | {"seed": "1"}, "seed"), ({**saved, "run_id": ""}, "run_id")):
        (state / "trainer.json").write_text(json.dumps(broken))
        with pytest.raises(CheckpointError, match=name):
            read_trainer(tmp_path)
