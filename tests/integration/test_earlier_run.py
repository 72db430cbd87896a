"""A checkpoint of an earlier version is resumed to the same bits."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent


def train(output_dir: Path) -> tuple[str, str]:
    """Trains up to the last step, with kernels that give the same bits on every processor."""
    environment = os.environ | {
        "ATEN_CPU_CAPABILITY": "default",
        "MKL_CBWR": "COMPATIBLE",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    command = [sys.executable, HERE / "earlier.py", output_dir, "16"]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.split()[-1], ended.stderr


@pytest.mark.scenario
@pytest.mark.skipif(
    platform.machine() != "x86_64" or not torch.__version__.startswith("2.13."),
    reason="its first half was computed with other kernels",
)
def test_a_run_saved_by_an_earlier_version_resumes_to_the_same_bits(tmp_path: Path) -> None:
    shutil.copytree(HERE / "earlier-run", tmp_path / "resumed" / "checkpoint-8")
    straight, resumed = train(tmp_path / "straight"), train(tmp_path / "resumed")
    assert "resumed from" in resumed[1] or "step 10/16" in resumed[1]
    assert "step 2/16" not in resumed[1]
    assert resumed[0] == straight[0]
