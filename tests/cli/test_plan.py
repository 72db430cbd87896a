"""`trainer-kit plan`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from kit.taken_over import Left, written_here

from trainer_kit.cli.main import main
from trainer_kit.cli.plan import show_plan

pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
FOLDER = Path(__file__).parent.parent.parent


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the tool is called with."""
    calls: list[Any] = []

    def plan(*words: Any, fail: Any) -> None:
        calls.append(words)

    monkeypatch.setattr("trainer_kit.cli.plan.show_plan", plan)
    return calls


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["SCRIPT"], (["SCRIPT"], None, False)),
        (["--json", "SCRIPT", "--num-processes", "4"], (["SCRIPT"], 4, True)),
        (["SCRIPT", "--", "--json", "-x"], (["SCRIPT", "--json", "-x"], None, False)),
        (["-m", "some.module", "--json", "--", "a"], (["-m", "some.module", "a"], None, True)),
    ],
)
def test_the_words(tmp_path: Path, asked: list[Any], words: list[str], expected: Any) -> None:
    script = tmp_path / "train.py"
    script.touch()
    main(["plan", *(str(script) if word == "SCRIPT" else word for word in words)])
    target, *others = expected
    assert asked == [([str(script) if word == "SCRIPT" else word for word in target], *others)]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["nowhere.py"], "there is no script 'nowhere.py'; for a module write -m before its name"),
        (["--num-processes", "0", "-m", "x"], "--num-processes 0 makes no sense; give 1 or more"),
    ],
)
def test_what_makes_no_sense(words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *words]) == 1
    assert capsys.readouterr().err == f"trainer-kit plan: {sentence}\n"


def test_no_script_at_all(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["plan"])
    assert "trainer-kit plan [options] [-m] script.py|module" in capsys.readouterr().err


@pytest.mark.scenario
def test_an_example(tmp_path: Path) -> None:
    script = [str(FOLDER / "examples" / "digits.py"), "--", "--short", "--output-dir", str(tmp_path / "run")]
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "trainer_kit", "plan", *script],
        capture_output=True, text=True, timeout=120, cwd=FOLDER, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "learning rate (AdamW, cosine)" in done.stdout
    assert "length       76 steps = 2 epochs of 38" in done.stdout
    assert not (tmp_path / "run").exists()


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
if kind == "says why":
    sys.exit("give a folder that is there")


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


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The script's path; it may be run in this process."""
    return written_here(SCRIPT, tmp_path, monkeypatch)


def planned(script: str, kind: str, processes: int | None = None, as_json: bool = False) -> tuple[Any, list[str]]:
    """The exit code, and what it failed for."""
    reasons: list[str] = []
    with pytest.raises(Left) as caught:
        show_plan([script, kind, str(Path(script).parent / "run")], processes, as_json, reasons.append)
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
    assert "train() would fail\n  - lr_scheduler_kwargs has 'power'" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        ("empty", "train_dataset is empty; give at least one sample"),
        ("resumed", "resume_from_checkpoint='nowhere' does not exist; give a checkpoint's folder, "),
    ],
)
def test_there_is_no_plan(script: str, kind: str, sentence: str) -> None:
    code, (said,) = planned(script, kind)
    assert code == 1
    assert said.startswith(sentence)


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        ("idle", r"train\.py never called Trainer\.train; give the script that trains"),
        ("raises", r"train\.py raised before it called Trainer\.train: LookupError"),
        ("leaves", r"train\.py left \(code 3\) before it called Trainer\.train"),
        ("says why", r"train\.py left \(give a folder that is there\) before it called Trainer\.train"),
    ],
)
def test_a_script_that_does_not_train(script: str, kind: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        show_plan([script, kind, str(Path(script).parent / "run")], None, False, print)


def test_a_traceback_begins_in_the_script(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="LookupError"):
        show_plan([script, "raises", "run"], None, False, print)
    shown = capsys.readouterr().err.splitlines()
    assert shown[0] == "Traceback (most recent call last):"
    assert shown[1].startswith(f'  File "{script}", line ')
    assert shown[-1] == "LookupError: no such data"


def test_a_module_is_called_by_its_name(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(script).parent))
    with pytest.raises(ValueError, match=r"^train never called Trainer\.train"):
        show_plan(["-m", "train", "idle", "run"], None, False, print)
