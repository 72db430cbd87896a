"""A small training whose records go to a tracker, in this process or in one that is killed.

python -m kit.tracked_training '{"folder": "run", "report_to": ["wandb"], "kill_at": 5}'
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trainer_kit import Trainer, TrainingArguments
from trainer_kit.callback import Callback
from trainer_kit.callbacks import read_log
from trainer_kit.run import Run

STEPS = 6
DATA = [{"x": torch.tensor([float(i % 5), 1.0]), "labels": torch.tensor(i % 2)} for i in range(24)]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.layer(x)
        return nn.functional.cross_entropy(logits, labels), logits


class Kill(Callback):
    """Ends the process as a machine that loses power does, after the checkpoint of an earlier step is written."""

    priority = 300

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, run: Run) -> None:
        if run.state.step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


def make_trainer(
    folder: Path | str, report_to: Any, kill_at: int | None = None, callbacks: Sequence[Callback] = (), **changes: Any
) -> Trainer:
    torch.manual_seed(0)
    options: dict[str, Any] = {
        "max_steps": STEPS, "logging_steps": 1, "save_steps": 2, "async_save": False, "eval_strategy": "steps",
        "eval_steps": 3, "per_device_train_batch_size": 4, "learning_rate": 0.1, "use_cpu": True, "run_name": "my run",
        "project": "my-project", "disable_tqdm": True, "log_level": "warning", "report_to": report_to,
    }  # fmt: skip
    args = TrainingArguments(str(folder), **(options | changes))
    kills = [] if kill_at is None else [Kill(kill_at)]
    return Trainer(Net(), args, DATA, DATA[:6], callbacks=[*callbacks, *kills])


def in_a_process(cwd: Path, **options: Any) -> int:
    """Train in a process of its own; returns its exit status."""
    tests = Path(__file__).parents[1]
    script = (
        f"import json, sys\nsys.path.insert(0, {str(tests)!r})\nfrom kit.tracked_training import main\n"
        "main(json.loads(sys.argv[1]))"
    )
    command = [sys.executable, "-c", script, json.dumps(options)]
    inherited = {name: value for name, value in os.environ.items() if name != "WANDB_SERVICE"}  # of this process
    done = subprocess.run(command, cwd=cwd, env=inherited, timeout=280, check=False)
    return done.returncode


def main(options: dict[str, Any]) -> None:
    resume = options.pop("resume", False)
    make_trainer(**options).train(resume_from_checkpoint=resume)
    sys.stdout.flush()


def losses(folder: Path) -> dict[int, float]:
    """The loss of each step by the run's own log, the last one where a step was taken twice."""
    return {record["step"]: record["loss"] for record in read_log(folder / "log.jsonl") if "loss" in record}
