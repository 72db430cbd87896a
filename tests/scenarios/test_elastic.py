"""Three machines of which some are lost, come again or leave while the others train on."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from scenarios import machine_task, task
from scenarios.machines import ADDRESSES, HOSTS, Command, Ended, Machines, finish, made_machines, why_not

PREVENTED = why_not()
pytestmark = [pytest.mark.scenario, pytest.mark.slow, pytest.mark.skipif(PREVENTED is not None, reason=str(PREVENTED))]

TASK = Path(machine_task.__file__)
EPOCHS = 2


class Elastic:
    """A training of 2 to 3 machines that counts how often it trains each sample.

    Args:
        machines: Where it trains.
        folder: A folder that all of them see.
    """

    def __init__(self, machines: Machines, folder: Path) -> None:
        self.machines = machines
        self.run, self.marks = folder / "run", folder / "marks"
        self.marks.mkdir(parents=True)
        self.commands: list[Command] = []

    def start(
        self,
        number: int,
        nodes: str = "2:3",
        timeout: int = 60,
        pause: float = 0.3,
        preloaded: bool = True,
        dies: str = "never",
        model: str = "counts",
        batch_size: int = 2,
        slow: str = "",
    ) -> Command:
        place = ["--num-nodes", nodes, "--num-processes", nodes[-1], "--master-addr", ADDRESSES[0]]
        limits = ["--master-port", "29517", "--start-timeout", str(timeout), "--cpu"]
        options = ["--model", model, "--batch-size", str(batch_size), "--pause", str(pause), "--marks", self.marks]
        options += ["--dies", HOSTS[2], dies] if dies != "never" else []
        options += ["--slow", slow] if slow else []
        words = ["-m", "trainer_kit", "launch", *place, *limits, TASK, self.run, *options]
        self.commands.append(self.machines.start(number, *words, preloaded=preloaded))
        return self.commands[-1]

    def start_all(self, **changes: Any) -> list[Command]:
        commands = [self.start(number, **changes) for number in range(3)]
        self.wait_for_step(5, commands[0])
        return commands

    def wait_for_step(self, step: int, command: Command) -> None:
        end = time.monotonic() + 120
        while not any(int(mark.name.rpartition("-")[2]) >= step for mark in self.marks.iterdir()):
            assert command.is_running(), command.err.read_text()
            assert time.monotonic() < end, command.err.read_text()
            time.sleep(0.02)

    def wait_for_text(self, text: str, command: Command) -> None:
        end = time.monotonic() + 120
        while text not in command.err.read_text():
            assert command.is_running(), command.err.read_text()
            assert time.monotonic() < end, command.err.read_text()
            time.sleep(0.02)

    def processes(self) -> set[int]:
        """IDs of all processes that have taken a step."""
        return {int(mark.read_text()) for mark in self.marks.iterdir()}

    def check(self, *ended: Ended) -> None:
        """Each sample of each epoch was trained once."""
        for each in ended:
            assert each.code == 0, each.err
            weights = json.loads(each.out)["weights"]
            assert weights == [-float(EPOCHS)] * task.SAMPLES, each.err


@pytest.fixture
def elastic(tmp_path: Path) -> Iterator[Elastic]:
    with made_machines(tmp_path, 3) as machines:
        yield Elastic(machines, tmp_path / "shared")


@pytest.mark.parametrize("moment", ["step", "exchange", "save"])
def test_a_machine_is_killed(elastic: Elastic, moment: str) -> None:
    """The others go on in their processes: between votes, while gradients are summed, while a checkpoint is written."""
    commands = elastic.start_all(pause=0.1, dies=moment)
    ended = finish(*commands[:2])
    elastic.check(*ended)
    assert f"{HOSTS[2]} is gone: 2 of 3 machines go on" in ended[1].err
    assert "went on with 2 processes instead of 3 at step" in ended[0].err
    assert len(elastic.processes()) == 3, "no process was started a second time"
    assert {json.loads(each.out)["pid"] for each in ended} < elastic.processes()
    assert "; restart " not in ended[0].err + ended[1].err, "it is no failure"
    assert not list(elastic.run.glob("crash*"))


def test_the_state_goes_on_as_from_a_checkpoint(elastic: Elastic) -> None:
    """With dropout, batch norm, a schedule and averaged weights, after a break in a backward pass: the same bits."""
    settings: dict[str, Any] = {"model": "noisy", "batch_size": 3}  # a batch norm takes no share of one sample
    commands = elastic.start_all(**settings, pause=0.2, dies="exchange")
    elastic.wait_for_text("went on with 2 processes instead of 3 at step 6", commands[0])
    shutil.copytree(elastic.run / "checkpoint-6", elastic.run.with_name("again") / "checkpoint-6")
    alone = finish(*commands[:2])
    elastic.run = elastic.run.with_name("again")
    resumed = finish(*(elastic.start(number, nodes="1:2", **settings, pause=0) for number in range(2)))
    states = [[json.loads(each.out)["state"] for each in ended] for ended in (alone, resumed)]
    assert states[0] == states[1]
    assert states[0][0] == states[0][1]


def test_a_process_is_killed_while_its_machine_stays(elastic: Elastic) -> None:
    """That is a failure: all start new processes from the newest checkpoint."""
    commands = elastic.start_all(pause=0.1, dies="process")
    ended = finish(*commands)
    elastic.check(*ended)
    assert len(elastic.processes()) == 6
    assert "; restart 1 of 5 within 1 h, from the checkpoint of step 6" in ended[2].err
    assert not any("restart 2 of 5" in each.err for each in ended)


def test_two_machines_are_killed_within_a_second(elastic: Elastic) -> None:
    commands = elastic.start_all(nodes="1:3")
    elastic.machines.kill(2)
    time.sleep(0.7)
    elastic.machines.kill(1)
    (ended,) = finish(commands[0])
    elastic.check(ended)


def test_a_killed_machine_comes_back(elastic: Elastic) -> None:
    commands = elastic.start_all()
    elastic.machines.kill(2)
    elastic.wait_for_text("2 processes keep 6 samples a step: 3 each instead of 2", commands[0])
    commands[2] = elastic.start(2)
    elastic.wait_for_text(f"{HOSTS[2]} joins: the run saves and goes on with it", commands[0])
    ended = finish(*commands)
    elastic.check(*ended)
    assert "3 processes keep 6 samples a step: 2 each instead of 3" in ended[0].err
    assert f"{HOSTS[2]} has joined: 3 of 3 machines go on" in ended[1].err
    assert "; restart " not in ended[0].err + ended[1].err


def test_a_cable_is_cut_and_mended(elastic: Elastic) -> None:
    """Long enough for TCP, which tries again after ever longer pauses."""
    commands = elastic.start_all(pause=0.8)
    elastic.machines.cut(2)
    elastic.wait_for_text(f"{HOSTS[2]} is gone: 2 of 3 machines go on", commands[0])
    elastic.machines.mend(2)
    elastic.check(*finish(*commands))


def test_the_machine_with_the_store_is_killed_and_comes_back(elastic: Elastic) -> None:
    """The folder's lock of its main process must not hold the others up."""
    commands = elastic.start_all(preloaded=False)
    elastic.machines.kill(0)
    elastic.wait_for_text("waiting for the first machine at", commands[1])
    commands[0] = elastic.start(0)
    ended = finish(*commands)
    elastic.check(*ended)
    assert not any("frame #" in each.err or "waiting to see whether it goes on" in each.err for each in ended)


def test_the_machine_with_the_store_is_lost_for_good(elastic: Elastic) -> None:
    commands = elastic.start_all(timeout=10, preloaded=False)
    elastic.machines.kill(0)
    for each in finish(*commands[1:]):
        assert each.code == 1
        assert f"the first machine at {ADDRESSES[0]}:29517 did not answer within 10 s" in each.err
        assert "frame #" not in each.err


def test_a_machine_leaves_when_told(elastic: Elastic) -> None:
    commands = elastic.start_all()
    commands[1].process.send_signal(signal.SIGTERM)
    first, second, third = finish(*commands)
    assert second.code == 143, second.err
    elastic.check(first, third)
    assert f"{HOSTS[1]} leaves: the run saves and goes on without it" in third.err
    left = first.err.partition("left at step ")[2].split()[0]
    assert f"checkpoint-{left} at step {left} of" in first.err, "nothing is done twice"
    assert "; restart " not in first.err + third.err, "it is no failure"


@pytest.mark.parametrize("told", [(0,), (0, 1, 2), (2, 1, 0)], ids=str)
def test_the_run_leaves_when_told(elastic: Elastic, told: tuple[int, ...]) -> None:
    commands = elastic.start_all()
    for number in told:
        commands[number].process.send_signal(signal.SIGTERM)
    assert [each.code for each in finish(*commands)] == [143] * 3
    assert (elastic.run / ".lock").exists() is False
    assert list(elastic.run.glob("checkpoint-*"))


def test_a_machine_too_many_waits_until_it_is_needed(elastic: Elastic) -> None:
    commands = [elastic.start(number, nodes="1:2", pause=0.6) for number in range(2)]
    elastic.wait_for_step(3, commands[0])
    commands.append(elastic.start(2, nodes="1:2"))
    elastic.wait_for_text("waiting for a place in the run", commands[2])
    elastic.machines.kill(1)
    ended = finish(commands[0], commands[2])
    elastic.check(*ended)


def test_a_machine_too_many_ends_with_the_run(elastic: Elastic) -> None:
    commands = [elastic.start(number, nodes="1:2", pause=0.6) for number in range(2)]
    elastic.wait_for_step(3, commands[0])
    commands.append(elastic.start(2, nodes="1:2"))
    first, second, spare = finish(*commands)
    elastic.check(first, second)
    assert (spare.code, spare.out) == (0, ""), spare.err


def test_a_slow_machine_is_replaced(elastic: Elastic) -> None:
    commands = [elastic.start(number, nodes="1:2", slow=HOSTS[1], pause=0.15) for number in range(2)]
    elastic.wait_for_step(1, commands[0])
    commands.append(elastic.start(2, nodes="1:2", slow=HOSTS[1], pause=0.15))
    first, second, third = finish(*commands)
    elastic.check(first, third)
    assert second.code == 143, second.err
    assert f"rank 1 on {HOSTS[1]} takes " in first.err
    assert f"{HOSTS[1]} is slow and leaves the run for a machine that waits" in second.err
    assert "; restart " not in first.err + third.err, "it is no failure"


def test_a_frozen_machine_is_left_behind(elastic: Elastic) -> None:
    """All of its processes stop, as on a virtual machine that is moved, and go on when the others have left it."""
    commands = elastic.start_all()
    name = elastic.machines.names[1]
    found = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=True).stdout.split()
    subprocess.run(["kill", "-STOP", *found], check=True)
    elastic.wait_for_text(f"{HOSTS[1]} is gone: 2 of 3 machines go on", commands[0])
    elastic.wait_for_text("went on with 2 processes instead of 3", commands[0])
    subprocess.run(["kill", "-CONT", *found], check=True)
    elastic.check(*finish(*commands))
