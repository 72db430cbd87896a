"""The page on exit codes names those that a training process has."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "en" / "reference" / "exit-codes.md").read_text(encoding="utf-8")
SCRIPT = """
import os, signal, sys
import torch
from trainer_kit import Callback, Trainer, TrainingArguments

class Model(torch.nn.Linear):
    def forward(self, x, labels):
        return torch.nn.functional.mse_loss(super().forward(x).squeeze(-1), labels)

class Events(Callback):
    def on_step_begin(self, run):
        if run.state.step == 1:
            for event in sys.argv[2:]:
                if event == "error":
                    raise RuntimeError("an error")
                os.kill(os.getpid(), getattr(signal, event))

rows = [{"x": torch.ones(2), "labels": torch.tensor(1.0)} for _ in range(12)]
args = TrainingArguments(output_dir=sys.argv[1], max_steps=3, report_to="none", use_cpu=True)
Trainer(Model(2, 1), args, rows, callbacks=[Events()]).train()
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="needs signals")
@pytest.mark.usefixtures("preloaded_python")
@pytest.mark.parametrize(
    ("events", "code", "last"),
    [
        ([], "0", 3),
        (["error"], "1", None),
        (["SIGINT"], "130", 2),
        (["SIGTERM"], "143", 2),
        (["SIGUSR1"], "143", 2),
        (["SIGKILL"], "128 + S", None),
    ],
)
def test_a_process_ends_as_the_page_says(events: list[str], code: str, last: int | None, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT, encoding="utf-8")
    command = [sys.executable, str(tmp_path / "train.py"), str(tmp_path / "run"), *events]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    shown = 128 - done.returncode if done.returncode < 0 else done.returncode  # as a shell has it
    expected = 128 + getattr(signal, events[-1]) if code == "128 + S" else int(code)
    assert shown == expected, done.stderr
    assert {path.name for path in (tmp_path / "run").glob("checkpoint-*")} == (
        {f"checkpoint-{last}"} if last else set()
    )
    assert f"| `{code}` |" in PAGE


def test_the_table_has_no_other_codes() -> None:
    assert re.findall(r"^\| `([^`]+)` \|", PAGE, re.MULTILINE) == ["0", "1", "130", "143", "128 + S"]
