"""Machines and processes that are killed go on from the copies of their state in memory."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from kit.preloaded import PreloadedPython
from kit.ranks import free_port
from scenarios import machine_task
from scenarios.machines import ADDRESSES, Command, Ended, Machines, finish, made_machines, why_not

from trainer_kit.checkpoint import find_checkpoints

pytestmark = [pytest.mark.scenario, pytest.mark.slow]
PREVENTED = why_not()
TASK = Path(machine_task.__file__)
OPTIONS = ("--copies", "memory", "--save-steps", "100")


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Machines]:
    with made_machines(tmp_path) as machines:
        yield machines


def launch(machines: Machines, number: int, *options: str | Path) -> Command:
    place = ["--num-nodes", "2", "--num-processes", "2", "--node-rank", str(number), "--master-addr", ADDRESSES[0]]
    words = ["-m", "trainer_kit", "launch", *place, "--master-port", "29517", "--cpu", TASK, *options]
    return machines.start(number, *words, *OPTIONS, "--fsdp", "--heartbeat", "3")


def states(*ended: Ended) -> list[str]:
    for each in ended:
        assert each.code == 0, each.err
    return [json.loads(each.out)["state"] for each in ended]


@pytest.mark.skipif(PREVENTED is not None, reason=str(PREVENTED))
def test_a_machine_is_killed_and_its_memory_is_lost(pair: Machines, tmp_path: Path) -> None:
    """With FSDP, where each machine has a part of the state."""
    folder = tmp_path / "shared"
    marks = tmp_path / "marks"
    marks.mkdir()
    both = [launch(pair, number, folder, "--marks", marks, "--pause", "0.4") for number in range(2)]
    both[0].wait_for(marks / "rank-0-step-7")
    pair.kill(1)
    shutil.rmtree(pair.disks[1] / "memory")
    assert [each.code == 0 for each in finish(*both)] == [False, False]
    resumed = finish(*(launch(pair, number, folder) for number in range(2)))
    straight = finish(*(launch(pair, number, Path("straight")) for number in range(2)))
    assert states(*resumed) == states(*straight)
    step = int(resumed[0].err.partition("resumed from ")[2].partition(" at step ")[2].split()[0])
    assert step in (6, 8), "at most two steps, and those that a copy took"
    assert f"checkpoint-{step} (" in resumed[0].err
    assert "from the memory of machine-" in resumed[0].err
    assert [list((disk / "memory").iterdir()) for disk in pair.disks] == [[], []]


def test_all_processes_of_a_machine_are_killed(tmp_path: Path) -> None:
    """The launcher starts new ones, which go on from memory, not from the start."""
    marks = tmp_path / "marks"
    marks.mkdir()

    def launched(name: str, *options: str | Path) -> tuple[PreloadedPython, Path]:
        place = ["-m", "trainer_kit", "launch", "--cpu", "--num-processes", "2", "--max-restarts", "1"]
        words = [*place, "--master-port", free_port(), TASK, tmp_path / name, *OPTIONS, *options]
        out, err = tmp_path / f"{name}.out", tmp_path / f"{name}.err"
        return PreloadedPython([*map(str, words)], out, err, setup=os.chdir, setup_args=(tmp_path,)), err

    def states_of(process: PreloadedPython) -> list[str]:
        out, err = process.communicate(100)
        assert process.returncode == 0, err
        return [json.loads(line)["state"] for line in out.splitlines()]

    killed, errors = launched("killed", "--marks", marks, "--pause", "0.4")
    end = time.monotonic() + 60
    while not all((marks / f"rank-{rank}-step-7").exists() for rank in range(2)):
        assert time.monotonic() < end, errors.read_text()
        time.sleep(0.01)
    for rank in range(2):
        os.kill(int((marks / f"rank-{rank}-step-7").read_text()), signal.SIGKILL)
    found = states_of(killed)
    straight, _ = launched("straight")
    assert found == states_of(straight)
    assert "resumed from" in errors.read_text()
    assert find_checkpoints(tmp_path / "killed")[0].name in ("checkpoint-6", "checkpoint-8")
    assert list((tmp_path / "memory").iterdir()) == []
