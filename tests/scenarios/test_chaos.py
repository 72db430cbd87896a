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

KILLS = {(1, "ddp"): 40, (2, "ddp"): 40, (4, "fsdp"): 12}  # by ranks and strategy
LIMIT = 600


@pytest.mark.timeout(LIMIT + 30)
def test_whenever_a_run_is_killed_it_ends_with_the_same_bits(tmp_path: Path) -> None:
    reports = {kind: tmp_path / f"{'-'.join(map(str, kind))}.json" for kind in KILLS}
    processes = {kind: start(*kind, kills, reports[kind]) for kind, kills in KILLS.items()}
    try:
        outputs = {kind: process.communicate(timeout=LIMIT)[0] for kind, process in processes.items()}
    finally:
        for process in processes.values():
            process.kill()
    _, alive = psutil.wait_procs(left_over(tmp_path), timeout=20)  # data workers look after their parents now and then
    assert not alive
    for kind, process in processes.items():
        assert process.returncode == 0, outputs[kind]
    kills = {kind: json.loads(report.read_text()) for kind, report in reports.items()}
    assert {kind: len(rows) for kind, rows in kills.items()} == KILLS
    assert {row["card"] for row in kills[1, "ddp"]} == set(chaos.cards(1))
    assert {row["card"] for row in kills[2, "ddp"]} >= {chaos.ALL, *chaos.moments.ON_ANY_RANK}


def start(ranks: int, strategy: str, kills: int, report: Path) -> subprocess.Popen[str]:
    command = [sys.executable, chaos.__file__, "--ranks", str(ranks), "--strategy", strategy, "--kills", str(kills)]
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
