"""Records at ClearML, read back from the sessions that its client writes offline."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from kit.tracked_training import losses

pytest.importorskip("clearml")

pytestmark = [pytest.mark.ecosystem]

# In a process of its own: ClearML changes modules of Python, and a process has one offline mode.
SCRIPT = """
import json, sys
sys.path.insert(0, sys.argv[1])
from clearml import Task
Task.set_offline(True)
from kit.tracked_training import make_trainer
from trainer_kit import Accelerator
{body}
"""

TRAINING = """
tracked = []
for steps in (4, 6):
    trainer = make_trainer("run", ["jsonl", "clearml"], max_steps=steps, report_artifacts=["last"])
    trainer.train(resume_from_checkpoint=steps == 6)
    tracked.append(trainer.events.state_dict()["Tracking"]["runs"]["clearml"])
assert tracked[0] == tracked[1], tracked
print("RUN", tracked[0])
"""

ACCELERATOR = """
import numpy as np
accelerator = Accelerator(cpu=True, log_with="clearml")
accelerator.init_trackers("theirs", {"lr": 0.1}, init_kwargs={"clearml": {"task_name": "mine"}})
accelerator.log({"eval_loss": 0.5, "nothing": float("nan"), "note": "text"}, step=3)
accelerator.log({"total": 7})
tracker = accelerator.get_tracker("clearml")
tracker.log_images({"picture": [np.zeros((4, 4, 3), np.uint8)]}, step=3)
tracker.log_table("table", columns=["a"], data=[[1]], step=3)
print("RUN", tracker.run_id)
accelerator.end_training()
"""

THEIRS = """
task = Task.init("theirs", "their task", auto_connect_frameworks=False)
make_trainer("run", ["jsonl", "clearml"]).train()
assert Task.current_task() is task
print("RUN", task.id)
task.close()
"""


def run(tmp_path: Path, body: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The task and its events."""
    # Else its client forks a process for its reports, and now and then waits for it without end.
    (tmp_path / "clearml.conf").write_text("sdk { development { report_use_subprocess: false } }")
    tests = str(Path(__file__).parents[1])
    env = {**os.environ, "HOME": str(tmp_path), "CLEARML_CACHE_DIR": str(tmp_path / "cache")}
    command = [sys.executable, "-c", SCRIPT.format(body=body), tests]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    name = next(line for line in done.stdout.splitlines() if line.startswith("RUN ")).split()[1]
    (folder,) = (path for path in tmp_path.rglob(name) if path.is_dir())
    events = [event for line in (folder / "metrics.jsonl").read_text().splitlines() for event in json.loads(line)]
    return json.loads((folder / "task.json").read_text()), events


def scalars(events: list[dict[str, Any]], metric: str, variant: str) -> list[tuple[int, float]]:
    return [
        (event["iter"], event["value"]) for event in events
        if (event["type"], event["metric"], event.get("variant")) == ("training_stats_scalar", metric, variant)
    ]  # fmt: skip


def test_a_training_and_its_resume(tmp_path: Path) -> None:
    task, events = run(tmp_path, TRAINING)
    assert (task["name"], task["project_name"]) == ("my run", "my-project")
    assert dict(scalars(events, "loss", "train")) == pytest.approx(losses(tmp_path / "run"))
    assert [step for step, _ in scalars(events, "loss", "eval")] == [3, 4, 6]
    assert task["hyperparams"]["trainer_kit"]["learning_rate"]["value"] == "0.1"
    assert [artifact["key"] for artifact in task["execution"]["artifacts"]] == ["last-checkpoint"]


def test_an_accelerator(tmp_path: Path) -> None:
    task, events = run(tmp_path, ACCELERATOR)
    assert (task["name"], task["project_name"]) == ("mine", "theirs")
    assert scalars(events, "loss", "eval") == [(3, 0.5)]
    assert scalars(events, "nothing", "train") == []  # ClearML would store zero
    texts = [event["msg"] for event in events if event["type"] == "log"] if events else []
    assert not texts or any("nan" in text for text in texts)
    assert {"picture", "table"} <= {event["metric"] for event in events if "metric" in event}


def test_a_task_of_the_program_is_used(tmp_path: Path) -> None:
    task, events = run(tmp_path, THEIRS)
    assert task["name"] == "their task"
    assert len(scalars(events, "loss", "train")) == 6
