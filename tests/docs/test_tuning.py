"""The script for an array of SLURM jobs in docs/en/how-to/tuning.md: each task has its folder, and resumes alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from kit.guides import Guide

pytestmark = pytest.mark.scenario

[JOB] = [block for block in Guide("docs/en/how-to/tuning.md").shell if "--array" in block]
[SCRIPT] = [block for block in Guide("docs/en/how-to/tuning.md").python if "SLURM_ARRAY_TASK_ID" in block]

BEFORE = """
import os, signal, torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(4, 2)

    def forward(self, x, labels):
        return torch.nn.functional.cross_entropy(self.layer(x), labels)

class Data(torch.utils.data.Dataset):
    read = 0

    def __len__(self):
        return 80

    def __getitem__(self, index):
        self.read += 1
        if self.read == int(os.environ["SIGNAL_AFTER"]):
            os.kill(os.getpid(), signal.SIGUSR1)
        return {"x": torch.full((4,), index / 80), "labels": index % 2}

model, train_dataset = Net(), Data()
"""


def run_task(folder: Path, task: int, signal_after: int = -1) -> int:
    """Run one task of the array 100, and return how it ends."""
    (folder / "train.py").write_text(BEFORE + SCRIPT)
    commands = folder / "bin"
    commands.mkdir(exist_ok=True)
    (commands / "scontrol").write_text(f'#!/bin/sh\necho "$@" >> {folder}/requeued\n')
    (commands / "scontrol").chmod(0o755)
    env = {
        **os.environ,
        "PATH": f"{commands}:{os.environ['PATH']}",
        "SLURM_JOB_ID": str(101 + task),
        "SLURM_ARRAY_JOB_ID": "100",
        "SLURM_ARRAY_TASK_ID": str(task),
        "SLURM_ARRAY_TASK_COUNT": "16",
        "SLURM_NTASKS": "1",
        "SLURM_PROCID": "0",
        "SLURM_LOCALID": "0",
        "SLURM_NODEID": "0",
        "SLURM_NNODES": "1",
        "SIGNAL_AFTER": str(signal_after),
        "CUDA_VISIBLE_DEVICES": "",
    }
    return subprocess.run([sys.executable, "train.py"], cwd=folder, env=env, timeout=120, check=False).returncode


def records(folder: Path, event: str) -> list[dict[str, Any]]:
    lines = map(json.loads, (folder / "log.jsonl").read_text().splitlines())
    return [line for line in lines if line["event"] == event]


def test_a_task_at_its_time_limit_saves_and_requeues_itself_alone(tmp_path: Path) -> None:
    assert "--kill-on-bad-exit=0" in JOB
    assert "--signal=USR1" in JOB
    assert run_task(tmp_path, 5, signal_after=81) == 143  # in the second epoch
    assert (tmp_path / "requeued").read_text() == "requeue 106\n"
    assert run_task(tmp_path, 2) == 0
    [other] = records(tmp_path / "search" / "2", "start")
    assert (other["arguments"]["learning_rate"], other["arguments"]["seed"]) == (1e-4, 0)
    assert run_task(tmp_path, 5) == 0
    first, second = records(tmp_path / "search" / "5", "start")
    assert (first["arguments"]["learning_rate"], first["arguments"]["seed"]) == (3e-5, 1)
    assert first.get("step", 0) == 0
    assert 10 < second["step"] < 30
    assert (tmp_path / "requeued").read_text() == "requeue 106\n"
    assert sorted(path.name for path in (tmp_path / "search").iterdir()) == ["2", "5"]
    for task in "25":
        assert (tmp_path / "search" / task / "checkpoint-30").is_dir()
