"""Three machines of which some are lost, come again or leave while the others train on."""

from __future__ import annotations

import json
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
    """A training of several machines that counts how often it trains each sample.

    Args:
        machines: Where it trains.
        folder: A folder that all of them see.

    Attributes:
        run: The output folder.
        candidates: Number of machines that can serve the store.
    """

    def __init__(self, machines: Machines, folder: Path) -> None:
        self.machines = machines
        self.run, self.marks = folder / "run", folder / "marks"
        self.marks.mkdir(parents=True)
        self.candidates = 1
        self.commands: list[Command] = []

    def start(
        self, number: int, nodes: str = "2:3", timeout: int = 60, pause: float = 0.3, preloaded: bool = True
    ) -> Command:
        place = [
            "--num-nodes",
            nodes,
            "--num-processes",
            nodes[-1],
            "--master-addr",
            ",".join(ADDRESSES[: self.candidates]),
        ]
        limits = ["--master-port", "29517", "--start-timeout", str(timeout), "--cpu"]
        options = ["--model", "counts", "--batch-size", "2", "--pause", str(pause), "--marks", self.marks]
        words = ["-m", "trainer_kit", "launch", *place, *limits, TASK, self.run, *options]
        self.commands.append(self.machines.start(number, *words, preloaded=preloaded))
        return self.commands[-1]

    def start_all(self, **changes: Any) -> list[Command]:
        commands = [self.start(number, **changes) for number in range(len(self.machines.names))]
        self.wait_for_step(5, commands[0])
        return commands

    def wait_for_step(self, step: int, command: Command) -> None:
        end = time.monotonic() + 120
        while not any(int(mark.name.rpartition("-")[2]) >= step for mark in self.marks.iterdir()):
            assert command.is_running(), command.err.read_text()
            assert time.monotonic() < end, command.err.read_text()
            time.sleep(0.02)

    def wait_for_text(self, text: str, *commands: Command) -> None:
        """Wait until one of the commands has written a text."""
        end = time.monotonic() + 120
        while not any(text in command.err.read_text() for command in commands):
            errors = "\n".join(command.err.read_text() for command in commands)
            assert any(command.is_running() for command in commands), errors
            assert time.monotonic() < end, errors
            time.sleep(0.02)

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


@pytest.mark.parametrize("comes_back", [False, True], ids=["for good", "for a while"])
def test_a_machine_is_killed(elastic: Elastic, comes_back: bool) -> None:
    commands = elastic.start_all()
    elastic.machines.kill(2)
    elastic.wait_for_text(f"{HOSTS[2]} is gone: 2 of 3 machines go on", commands[0])
    if comes_back:
        elastic.wait_for_text("resumed with 2 processes that read data instead of 3", commands[0])
        commands[2] = elastic.start(2)
        elastic.wait_for_text(f"{HOSTS[2]} joins: the run saves and goes on with it", commands[0])
    ended = finish(*commands[: 3 if comes_back else 2])
    elastic.check(*ended)
    assert "; restart 1 of 5 within 1 h, from the checkpoint of step 3" in ended[0].err + ended[1].err
    assert ("resumed with 3 processes that read data instead of 2" in ended[0].err) == comes_back
    assert (f"{HOSTS[2]} has joined: 3 of 3 machines go on" in ended[1].err) == comes_back
    assert "restart 2" not in ended[0].err + ended[1].err


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


@pytest.fixture
def four(tmp_path: Path) -> Iterator[Elastic]:
    with made_machines(tmp_path, 4) as machines:
        yield Elastic(machines, tmp_path / "shared")


def test_the_next_candidate_serves_the_store(four: Elastic) -> None:
    """Both machines that served it are killed in turn."""
    four.candidates = 3
    commands = four.start_all(nodes="1:4", pause=0.5)
    four.machines.kill(0)
    four.wait_for_text(f"{HOSTS[0]} is gone: 3 of 4 machines go on", commands[2])
    four.machines.kill(1)
    four.wait_for_text(f"{HOSTS[1]} is gone: 2 of 4 machines go on", commands[2])
    four.check(*finish(*commands[2:]))


@pytest.mark.parametrize("is_shared", [True, False], ids=["shared folder", "own disks"])
def test_a_split_network_trains_on_one_side(four: Elastic, is_shared: bool) -> None:
    """The machines of each side reach one another, and each side can serve a store."""
    four.candidates = 4
    if not is_shared:
        four.run = Path("run")
    commands = four.start_all(nodes="1:4", pause=0.5, timeout=25)
    four.machines.split(2)
    four.wait_for_text(": the others may be going on; stopped, start again to join them", *commands)
    outcomes = finish(*commands)
    sides = [{each.code for each in outcomes[:2]}, {each.code for each in outcomes[2:]}]
    assert sorted(map(sorted, sides)) == [[0], [75]], [each.err for each in outcomes]
    goes_on = sides.index({0}) * 2
    four.check(*outcomes[goes_on : goes_on + 2])


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


def test_a_frozen_machine_is_left_behind(elastic: Elastic) -> None:
    """All of its processes stop, as on a virtual machine that is moved, and go on when the others have left it."""
    commands = elastic.start_all()
    name = elastic.machines.names[1]
    found = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=True).stdout.split()
    subprocess.run(["kill", "-STOP", *found], check=True)
    elastic.wait_for_text(f"{HOSTS[1]} is gone: 2 of 3 machines go on", commands[0])
    subprocess.run(["kill", "-CONT", *found], check=True)
    elastic.check(*finish(*commands))
