"""A script whose training is taken over runs as it is, up to its call of `train`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import sys
import torch
from trainer_kit import Trainer, TrainingArguments

class Line(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def forward(self, x):
        return {"loss": self.layer(x).mean()}

if __name__ == "__main__":
    data = [{"x": torch.ones(1)}] * 4
    trainer = Trainer(Line(), TrainingArguments("run", max_steps=3, report_to="none", log_level="error"), data)
    print("script", sys.argv)
    print("got", trainer.train(resume_from_checkpoint=True))
"""

TOOL = """
import sys
from trainer_kit.tools.takeover import run_script

def take_over(trainer, train, resume_from_checkpoint):
    print("took over", trainer.args.max_steps, resume_from_checkpoint)
    return train(False).global_step

run_script(sys.argv[1:], take_over)
"""


@pytest.mark.parametrize("words", [["train.py"], ["-m", "train"]])
def test_the_tool_trains_in_place_of_the_script(words: list[str], tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", TOOL, *words, "--x", "a b"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    script, took, got = done.stdout.splitlines()
    assert script.endswith("train.py', '--x', 'a b']")
    assert (took, got) == ("took over 3 True", "got 3")
