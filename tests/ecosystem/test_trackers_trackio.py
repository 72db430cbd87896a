"""Records of Trackio, read back from its database."""

from __future__ import annotations

import json
import math
import os
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from kit.tracked_training import losses

pytest.importorskip("trackio")

pytestmark = [pytest.mark.ecosystem]

# In a process of its own: Trackio reads its folder when it is imported.
SCRIPT = "import sys; sys.path.insert(0, sys.argv[1])\nfrom kit.tracked_training import make_trainer\n"

TRAINING = """
options = {"report_artifacts": ["last"]}
make_trainer("run", ["jsonl", "trackio"], max_steps=4, **options).train()
trainer = make_trainer("run", ["jsonl", "trackio"], **options)
trainer.train(resume_from_checkpoint=True)
trainer.evaluate()
"""

ACCELERATOR = """
from trainer_kit import Accelerator
accelerator = Accelerator(cpu=True, log_with="trackio")
accelerator.init_trackers("theirs", {"lr": 0.1}, init_kwargs={"trackio": {"name": "mine"}})
accelerator.log({"loss": 0.5, "nothing": float("nan")}, step=3)
accelerator.end_training()
"""


def run(tmp_path: Path, body: str, project: str) -> sqlite3.Connection:
    env = {**os.environ, "TRACKIO_DIR": str(tmp_path / "trackio"), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", SCRIPT + body, str(Path(__file__).parents[1])]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    return sqlite3.connect(tmp_path / "trackio" / f"{project}.db")


def rows(database: sqlite3.Connection) -> list[tuple[str, str, int, dict[str, Any]]]:
    found = database.execute("SELECT run_id, run_name, step, metrics FROM metrics ORDER BY id")
    return [(run_id, name, step, json.loads(metrics)) for run_id, name, step, metrics in found]


def test_a_training_and_its_resume(tmp_path: Path) -> None:
    database = run(tmp_path, TRAINING, "my-project")
    found = rows(database)
    assert len({(run_id, name) for run_id, name, _, _ in found}) == 1
    assert found[0][1] == "my run"
    history = [(step, metrics["train/loss"]) for _, _, step, metrics in found if "train/loss" in metrics]
    assert history == list(losses(tmp_path / "run").items())
    assert [step for _, _, step, metrics in found if "eval/loss" in metrics] == [3, 4, 6, 6]
    (config,) = database.execute("SELECT config FROM configs").fetchone()
    assert json.loads(config)["learning_rate"] == 0.1
    names = [name for (name,) in database.execute("SELECT name FROM artifacts")]
    assert names == ["last-checkpoint-my-run"]


def test_an_accelerator(tmp_path: Path) -> None:
    ((_, name, step, metrics),) = rows(run(tmp_path, ACCELERATOR, "theirs"))
    assert (name, step, metrics["loss"]) == ("mine", 3, 0.5)
    assert math.isnan(float(metrics["nothing"]))
