"""A user's own script is planned as it is."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, NoReturn

import pytest

from trainer_kit import Trainer
from trainer_kit.tools.plan import plan

pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")

SCRIPT = """
import sys

import torch
from torch import nn
from trainer_kit import Trainer, TrainingArguments

kind, folder = sys.argv[1:]
print("the script begins")
if kind == "raises":
    raise LookupError("no such data")
if kind == "leaves":
    sys.exit(3)


class Net(nn.Linear):
    def forward(self, x, labels):
        return nn.functional.cross_entropy(super().forward(x), labels)


samples = [] if kind == "empty" else [(torch.zeros(4), torch.tensor(1))] * 24
args = TrainingArguments(
    folder, num_train_epochs=2, use_cpu=True, report_to="none", disable_tqdm=True, log_level="error",
    lr_scheduler_kwargs={"power": 2} if kind == "wrong" else {},
)
trainer = Trainer(Net(4, 3), args, samples)
if kind != "idle":
    try:
        trainer.train(resume_from_checkpoint="nowhere" if kind == "resumed" else None)
    finally:
        print("the script goes on")
"""


class Left(BaseException):
    """In place of the end of this process."""


def left(code: int) -> NoReturn:
    raise Left(code)


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The script's path; it may be run in this process, which is as before afterwards."""
    monkeypatch.setattr(Trainer, "train", Trainer.train)
    monkeypatch.setattr("trainer_kit.tools.takeover.leave", left)
    monkeypatch.setattr(sys, "argv", [*sys.argv])
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return str(path)


def planned(script: str, kind: str, processes: int | None = None, as_json: bool = False) -> tuple[Any, list[str]]:
    """The exit code, and what it failed for."""
    reasons: list[str] = []
    with pytest.raises(Left) as caught:
        plan([script, kind, str(Path(script).parent / "run")], processes, as_json, reasons.append)
    return caught.value.args[0], reasons


def test_a_script_is_planned(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert planned(script, "fine") == (0, [])
    shown = capsys.readouterr().out
    assert shown.startswith("the script begins\ndata         24 samples to train on\n")
    assert "length       6 steps = 2 epochs of 3, 48 samples" in shown
    assert not (Path(script).parent / "run").exists()


def test_for_machines_stdout_is_the_plan_alone(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert planned(script, "fine", processes=3, as_json=True) == (0, [])
    shown = capsys.readouterr()
    found = json.loads(shown.out)
    assert found["batch"]["processes"] == 3
    assert found["steps"]["last"] == 2
    assert "the script begins" in shown.err


def test_a_training_that_would_not_go_through(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert planned(script, "wrong") == (1, [])
    assert "train() would not go through\n  - lr_scheduler_kwargs has 'power'" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        ("empty", "train_dataset is empty; give at least one sample"),
        ("resumed", "resume_from_checkpoint='nowhere' is no folder; give a checkpoint's folder, or True"),
    ],
)
def test_there_is_no_plan(script: str, kind: str, sentence: str) -> None:
    assert planned(script, kind) == (1, [sentence])


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        ("idle", r"train\.py never called Trainer\.train; give the script that trains"),
        ("raises", r"train\.py raised before it called Trainer\.train: LookupError"),
        ("leaves", r"train\.py left \(code 3\) before it called Trainer\.train"),
    ],
)
def test_a_script_that_does_not_train(script: str, kind: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        plan([script, kind, str(Path(script).parent / "run")], None, False, print)
