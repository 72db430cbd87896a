"""The command line's tools on a script that trains a sharded model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from trainer_kit.checkpoint import read_state

pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.usefixtures("preloaded_python")]

SCRIPT = """
import os
from kit.block_training import Blocks, arguments, rows
from trainer_kit import Trainer

def loss(model, batch):
    if os.environ.get("RANK", "0") == os.environ.get("FAILS_ON"):
        raise RuntimeError("no loss here")
    return model(**batch)["loss"]

args = arguments("out", "fsdp", save_strategy="steps", save_steps=1, report_to=["html", "jsonl"], log_level="info")
trainer = Trainer(Blocks(), args, rows(13), rows(5), compute_loss=loss)
if __name__ == "__main__":
    trainer.train()
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


def trainer_kit(script: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"} | variables
    command = [sys.executable, "-m", "trainer_kit", *words]
    return subprocess.run(
        command, cwd=script.parent, env=environment, capture_output=True, text=True, timeout=240, check=False
    )


def planned_weights(script: Path, processes: str) -> int:
    """Bytes of the weights in the memory of a step."""
    plan = json.loads(trainer_kit(script, "plan", "--json", "--num-processes", processes, "script.py").stdout)
    return plan["memory"]["parts"]["weights"]  # type: ignore[no-any-return]


def test_a_run_is_planned_launched_and_reported(script: Path) -> None:
    plan = trainer_kit(script, "plan", "--num-processes", "2", "script.py")
    assert plan.returncode == 0, plan.stderr
    assert "8 samples = 2 per device x 2 accumulated x 2 processes" in plan.stdout
    assert "(FSDP)" in plan.stdout
    assert planned_weights(script, "1") == pytest.approx(2 * planned_weights(script, "2"), rel=0.05)
    launched = trainer_kit(script, "launch", "--num-processes", "2", "--cpu", "--fsdp", "script.py")
    assert launched.returncode == 0, launched.stderr
    report = trainer_kit(script, "report", "--format", "md", "out")
    assert report.returncode == 0, report.stderr
    listed = trainer_kit(script, "checkpoints", "verify", "out/checkpoint-4")
    assert listed.returncode == 0, listed.stdout + listed.stderr


def test_an_error_on_one_rank_is_kept_without_a_collective_and_replayed(script: Path) -> None:
    """The other rank waits in its forward pass until the first one has left."""
    launched = trainer_kit(script, "launch", "--num-processes", "2", "--cpu", "--fsdp", "script.py", FAILS_ON="1")
    assert launched.returncode != 0
    assert "RuntimeError: no loss here" in launched.stderr
    folder = script.parent / "out" / "crash-1-rank-1"
    report = read_state(folder, "report")
    assert report["weights_by_rank"] is None
    assert "weights: each process holds a part of them, and this one may have failed alone" in report["missing"]
    assert not folder.with_name("crash-1").exists()
    replayed = trainer_kit(script, "replay", str(folder), "script.py", FAILS_ON="1", RANK="1")
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr
    assert "reproduced" in replayed.stdout


def test_a_killed_run_goes_on_with_the_same_bits(script: Path) -> None:
    verified = trainer_kit(script, "verify", "--num-processes", "2", "--steps", "4", "--seed", "1", "script.py")
    assert verified.returncode == 0, verified.stdout + verified.stderr
    assert "bitwise equal: 4 of 4 steps" in verified.stdout
