"""See `chaos`, which runs longer by hand."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from scenarios import chaos

pytestmark = [
    pytest.mark.scenario,
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="forks processes that train"),
]

KILLS = {1: 60, 2: 40}  # by ranks
LIMIT = 600


@pytest.mark.timeout(LIMIT + 30)
def test_whenever_a_run_is_killed_it_ends_with_the_same_bits(tmp_path: Path) -> None:
    reports = {ranks: tmp_path / f"{ranks}.json" for ranks in KILLS}
    processes = {ranks: start(ranks, report, KILLS[ranks]) for ranks, report in reports.items()}
    try:
        outputs = {ranks: process.communicate(timeout=LIMIT)[0] for ranks, process in processes.items()}
    finally:
        for process in processes.values():
            process.kill()
    _, alive = psutil.wait_procs(left_over(tmp_path), timeout=20)  # data workers look after their parents now and then
    assert not alive
    for ranks, process in processes.items():
        assert process.returncode == 0, outputs[ranks]
    kills = {ranks: json.loads(report.read_text()) for ranks, report in reports.items()}
    assert {ranks: len(rows) for ranks, rows in kills.items()} == KILLS
    assert {row["card"] for row in kills[1]} == set(chaos.cards(1))
    assert {row["card"] for row in kills[2]} >= {chaos.ALL, *chaos.moments.ON_ANY_RANK}


@pytest.mark.timeout(LIMIT + 30)
def test_whenever_a_sharded_run_is_killed_it_ends_with_the_same_bits(tmp_path: Path) -> None:
    process = start(2, tmp_path / "report.json", 20, "--strategy", "fsdp")
    try:
        output, _ = process.communicate(timeout=LIMIT)
    finally:
        process.kill()
    assert process.returncode == 0, output
    assert len(json.loads((tmp_path / "report.json").read_text())) == 20


def start(ranks: int, report: Path, kills: int, *options: str) -> subprocess.Popen[str]:
    command = [sys.executable, chaos.__file__, "--ranks", str(ranks), "--kills", str(kills), *options]
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "TMPDIR": str(report.parent),
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    return subprocess.Popen(
        [*command, "--report", str(report)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
    )


def left_over(folder: Path) -> list[psutil.Process]:
    """What still runs with this folder for its temporary files."""
    return [process for process in psutil.process_iter() if _environment(process).get("TMPDIR") == str(folder)]


def _environment(process: psutil.Process) -> dict[str, str]:
    try:
        return process.environ()
    except psutil.Error:
        return {}
