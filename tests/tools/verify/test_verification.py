"""`trainer-kit verify`: an honest script is equal, and each way of breaking is told by its name."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.forked import verified
from kit.tracked_training import make_trainer

from trainer_kit.callbacks import Tracking
from trainer_kit.errors import ScriptFailed
from trainer_kit.tools.verify.child import watch
from trainer_kit.tools.verify.recorder import RecordedStart
from trainer_kit.tools.verify.report import describe
from trainer_kit.tools.verify.verification import describe_difference
from trainer_kit.trackers import Tracker

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="starts are forked, and killed by SIGKILL")


@pytest.mark.scenario
@pytest.mark.parametrize(
    ("way", "seed"),
    [
        pytest.param("", 1, marks=pytest.mark.smoke),
        ("", 2),
        ("stream", 3),
        ("stream falls back", 3),
        ("unsaved cache", 4),
        ("transformers", 5),
        ("noise", 6),
    ],
)
def test_an_honest_script_is_equal(way: str, seed: int, tmp_path: Path) -> None:
    result = verified(way, seed)
    assert result.difference is None, describe(result, "")
    assert result.kill is not None
    assert result.resumed_from is not None
    assert 0 < result.resumed_from < result.kill.step <= result.steps == 6
    assert describe(result, "again").startswith("bitwise equal: 6 of 6 steps, killed and resumed")
    assert not list(tmp_path.iterdir())  # neither the script's own output_dir, nor what it saves after the training


@pytest.mark.scenario
@pytest.mark.parametrize(
    ("way", "told"),
    [
        ("fails", "ValueError: this script has a mistake"),
        ("raises", "LookupError: nothing was found"),
        ("never trains", "without a training by Trainer.train()"),
        ("one step", "ends by itself at step 1, too early"),
        ("stops early", "ends by itself at step 1, too early"),
    ],
)
def test_a_script_that_cannot_be_verified(way: str, told: str, tmp_path: Path) -> None:
    with pytest.raises(ScriptFailed) as caught:
        verified(way, seed=8)
    assert told in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_how_much_tensors_differ() -> None:
    one = torch.tensor([1.0, 2.0, float("nan")])
    assert describe_difference(one, one) == ""
    assert describe_difference(one, torch.tensor([1.0, 2.5, float("nan")])) == "in 1 of 3 elements, by at most 0.5"
    assert describe_difference(one, one[:2]) == "torch.float32 of shape [3] and torch.float32 of shape [2]"
    assert describe_difference(torch.tensor([True]), torch.tensor([False])) == "in 1 of 1 elements"


def test_no_start_has_a_run_at_a_tracker(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path / "run", ["jsonl", "html", Silent()], report_artifacts=["report", "last"])
    assert any(isinstance(each, Tracking) for each in trainer.events.callbacks)
    watch(trainer, RecordedStart("first", str(tmp_path), "verified", steps=2, seed=0, chance=0, save_at=1))
    assert not any(isinstance(each, Tracking) for each in trainer.events.callbacks)
    assert trainer.args.report_artifacts == []


class Silent(Tracker):
    def log(self, values: Any, step: int | None = None, **kwargs: Any) -> None:
        pass
