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
    try:
        trainer.train(resume_from_checkpoint=True)
    except:
        print("an error came up")
    finally:
        print("the end of the script")
"""

TOOL = """
import sys
from trainer_kit.tools.script_runner import run_script

def take_over(trainer, train, resume_from_checkpoint):
    print("took over", trainer.args.max_steps, resume_from_checkpoint)
    if "fails" in sys.argv:
        raise LookupError("nothing was found")
    if "leaves" in sys.argv:
        sys.exit(143)
    return train(False).global_step

run_script(sys.argv[1:], take_over)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "code"),
    [(["train.py"], 3), (["-m", "train"], 3), (["train.py", "fails"], 1), (["train.py", "leaves"], 143)],
)
def test_the_process_ends_with_what_the_tool_does(words: list[str], code: int, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", TOOL, *words, "--x", "a b"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == code, done.stderr
    script, took = done.stdout.splitlines()
    assert script.endswith("'--x', 'a b']")
    assert took == "took over 3 True"
    assert done.stderr.endswith("LookupError: nothing was found\n" if code == 1 else "")
