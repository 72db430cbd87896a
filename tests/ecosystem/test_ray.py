"""The scripts of the docs for Ray Tune and Ray Train, on two CPUs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("ray")

pytestmark = [pytest.mark.ecosystem, pytest.mark.timeout(600)]

PAGE = Path(__file__).parents[2] / "docs" / "en" / "how-to" / "tuning.md"
BEGIN = """
import json
import ray
import torch
from pathlib import Path

HOME = Path({home!r})


class Net(torch.nn.Module):
    calls = 0

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 2)

    def forward(self, x, labels):
        if {faulty} and self.training:
            Net.calls += 1
            if Net.calls == 25 and not (HOME / "failed").exists():
                (HOME / "failed").touch()
                raise RuntimeError("a fault")
        x = torch.nn.functional.dropout(x, 0.2, self.training)
        return torch.nn.functional.cross_entropy(self.layer(x), labels)


def make_model():
    torch.manual_seed(0)
    return Net()


rows = torch.randn(320, 4, generator=torch.Generator().manual_seed(1))
train = [{{"x": row, "labels": int(row[0] > 0)}} for row in rows]
test = train[:40]
ray.init(num_cpus=2, include_dashboard=False, object_store_memory=200_000_000)
"""


def script(heading: str, changes: dict[str, str]) -> str:
    """The code of a section of the page, with some of its values changed."""
    text = PAGE.read_text(encoding="utf-8")
    [code] = re.findall(rf"^## {heading}$.*?^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    for old, new in changes.items():
        assert code.count(old) == 1, old
        code = code.replace(old, new)
    return str(code)


def run(tmp_path: Path, code: str, faulty: bool = False) -> str:
    path = tmp_path / "script.py"
    path.write_text(BEGIN.format(home=str(tmp_path), faulty=faulty) + code)
    variables = os.environ | {
        "RAY_TRAIN_V2_ENABLED": "1",
        "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "300",  # on a busy machine
        "RAY_AUTH_MODE": "disabled",
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    done = subprocess.run(
        [sys.executable, str(path)],
        env=variables,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=560,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def test_tune(tmp_path: Path) -> None:
    changes = {
        "max_steps=1000": "max_steps=40, per_device_train_batch_size=4, use_cpu=True",
        "eval_steps=50": "eval_steps=10",
        "tune.loguniform(1e-5, 1e-2)": "tune.grid_search([1e-6, 1e-1])",
        "num_samples=20": "num_samples=1",
        "max_t=1000": "max_t=40",
    }
    code = script("Ray Tune", changes) + "\n(HOME / 'best.json').write_text(json.dumps(best))\n"
    run(tmp_path, code)
    assert json.loads((tmp_path / "best.json").read_text()) == {"learning_rate": 0.1}


def train(folder: Path, faulty: bool) -> Path:
    """Run the script for Ray Train; return the last checkpoint that Ray has."""
    folder.mkdir()
    changes = {
        "per_device_train_batch_size=16": "per_device_train_batch_size=4, max_steps=40, save_steps=10, use_cpu=True",
        "eval_steps=50": "eval_steps=10",
        "/shared/runs/demo": str(folder / "demo"),
        "/shared/ray": str(folder / "ray"),
        ", use_gpu=True": "",
    }
    output = run(folder, script("Ray Train", changes) + "\nprint('END', result.checkpoint.path)\n", faulty)
    assert (folder / "failed").exists() == faulty
    [reported] = re.findall(r"END (.*)$", output, re.MULTILINE)
    return Path(reported)


def test_workers_that_failed_resume_from_what_was_reported(tmp_path: Path) -> None:
    failed, whole = train(tmp_path / "failed", faulty=True), train(tmp_path / "whole", faulty=False)
    assert json.loads((failed / "state" / "trainer.json").read_text())["counters"]["step"] == 40
    assert (failed / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
