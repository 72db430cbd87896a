from __future__ import annotations

import dataclasses
from enum import Enum
from pathlib import Path
from typing import Any

import pytest

from trainer_kit import TrainingArguments
from trainer_kit.trackers import Tracker


@dataclasses.dataclass  # compares by value, and is not hashable
class Mine(Tracker):
    name = "mine"

    def log(self, values: Any, step: int | None = None, **kwargs: Any) -> None:
        pass


class Reporter(str, Enum):
    WANDB = "wandb"


def test_trackers_are_kept_in_order_and_once() -> None:
    mine = Mine()
    args = TrainingArguments(report_to=["mlflow", mine, Reporter.WANDB, "jsonl", "mlflow"])
    assert args.report_to == ["jsonl", "mlflow", mine, "wandb"]
    assert [type(each) for each in args.report_to] == [str, str, Mine, str]
    assert TrainingArguments(report_to="wandb").report_to == ["wandb"]
    assert TrainingArguments(report_to="all").report_to == ["tensorboard", "jsonl", "html"]


def test_arguments_with_trackers_are_data(tmp_path: Path) -> None:
    args = TrainingArguments(report_to=["jsonl", "wandb", Mine()])
    assert args.to_dict()["report_to"] == ["jsonl", "wandb"]
    args.save(tmp_path / "arguments.json")
    assert TrainingArguments.load(tmp_path / "arguments.json").report_to == ["jsonl", "wandb"]
    assert dataclasses.replace(args, seed=3).report_to == args.report_to
    assert args.to_dict() == TrainingArguments.from_dict(args.to_dict()).to_dict()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            {"report_to": "wnadb"},
            "report_to='wnadb' is not allowed; it must be 'all', 'none', or a list of .* and",
        ),
        ({"report_to": [Mine]}, "report_to=.* is not allowed; it must be"),
        ({"report_to": [Mine(), "all"]}, "'all' and 'none' must stand alone"),
        ({"report_artifacts": ["model"]}, "it must be a list of 'report', 'best' and 'last'"),
        ({"report_artifacts": ["last"]}, r"report_artifacts=\['last'\] needs a tracker that stores them; add one to"),
        (
            {"report_to": ["wandb"], "report_artifacts": ["report"]},
            "needs a report; add 'html' and 'jsonl' to report_to",
        ),
        (
            {"report_to": ["wandb"], "report_artifacts": ["last"], "save_strategy": "no"},
            "needs checkpoints; set save_strategy to another than 'no'",
        ),
        (
            {"report_to": ["wandb"], "report_artifacts": ["best"]},
            "needs a metric for the best one; set metric_for_best_model",
        ),
        ({"run_name": ""}, "run_name='' is not allowed; it must be a name that is not empty"),
        ({"project": ""}, "project='' is not allowed; it must be a name that is not empty"),
    ],
)
def test_what_is_refused(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        TrainingArguments(**options)
