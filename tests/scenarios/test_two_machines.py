"""Training on two machines that a network cable joins."""

from __future__ import annotations

import json
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from scenarios import machine_task
from scenarios.machines import ADDRESSES, HOSTS, Command, Ended, Machines, finish, made_machines, why_not

from trainer_kit.checkpoint import find_checkpoints, verify

PREVENTED = why_not()
pytestmark = [pytest.mark.scenario, pytest.mark.slow, pytest.mark.skipif(PREVENTED is not None, reason=str(PREVENTED))]

TASK = Path(machine_task.__file__)
PORT = "29517"


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Machines]:
    with made_machines(tmp_path) as machines:
        yield machines


def start(machines: Machines, number: int, *options: str | Path, address: str = ADDRESSES[0]) -> Command:
    """One process on a machine, told its place as a scheduler would."""
    place = {"RANK": number, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "GROUP_RANK": number}
    environment = {name: str(value) for name, value in place.items()}
    return machines.start(number, TASK, *options, **environment, MASTER_ADDR=address, MASTER_PORT=PORT)


def launch(machines: Machines, number: int, *options: str | Path, restarts: int = 0, preloaded: bool = True) -> Command:
    """The same with `trainer-kit launch`."""
    place = ["--num-nodes", "2", "--num-processes", "2", "--node-rank", str(number), "--master-addr", ADDRESSES[0]]
    place += ["--master-port", PORT, "--max-restarts", str(restarts)]
    return machines.start(number, "-m", "trainer_kit", "launch", *place, "--cpu", TASK, *options, preloaded=preloaded)


def results(*ended: Ended) -> list[dict[str, Any]]:
    """What the processes printed, in order of rank."""
    for each in ended:
        assert each.code == 0, each.err
    return [json.loads(each.out) for each in ended]


def states(*ended: Ended) -> list[str]:
    return [each["state"] for each in results(*ended)]


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The states in which a run ends that nothing disturbs."""
    with made_machines(tmp_path_factory.mktemp("straight")) as machines:
        return states(*finish(*(start(machines, number, "run") for number in range(2))))


def test_two_machines_train_as_one_process(pair: Machines, tmp_path: Path) -> None:
    options = ("run", "--model", "smooth")
    options = (*options, "--batch-size")
    ended = finish(*(launch(pair, number, *options, "2", preloaded=False) for number in range(2)))
    first, second = results(*ended)
    alone = machine_task.train(machine_task.options([str(tmp_path / "alone"), *options[1:], "4"]))
    assert first["weights"] == second["weights"]
    assert first["weights"] == pytest.approx(alone["weights"], rel=0, abs=1e-12)
    assert first["loss"] == pytest.approx(alone["loss"], rel=0, abs=1e-12)
    assert first["step"] == alone["step"] == 32
    report = (
        f"2 processes on 2 machines, which meet at {ADDRESSES[0]}:{PORT}\n"
        f"  machine 0, {HOSTS[0]}: rank 0 on cpu\n"
        f"  machine 1, {HOSTS[1]}: rank 1 on cpu\n"
    )
    assert report in ended[0].err
    assert report not in ended[1].err
    assert (
        f"{pair.work / 'run'} is not shared with {HOSTS[1]}: checkpoints and logs are on {HOSTS[0]} alone"
        in ended[0].err
    )
    assert not (pair.disks[1] / "run").exists()


@pytest.mark.parametrize("is_shared", [False, True], ids=["own disks", "shared disk"])
def test_killed_and_resumed_ends_with_the_same_bits(
    pair: Machines, straight: list[str], tmp_path: Path, is_shared: bool
) -> None:
    folder = tmp_path / "shared" if is_shared else Path("run")
    marks = tmp_path / "marks"
    marks.mkdir()
    both = [start(pair, number, folder, "--marks", marks, "--pause", "0.1") for number in range(2)]
    both[0].wait_for(marks / "rank-0-step-7")
    for command in both:
        command.process.send_signal(signal.SIGKILL)
    assert [each.code for each in finish(*both)] == [-signal.SIGKILL] * 2
    if not is_shared:  # what another run has left where the main process has its newest checkpoint
        newest = find_checkpoints(pair.disks[0] / folder)[-1]
        stale = pair.disks[1] / folder / newest.name
        shutil.copytree(find_checkpoints(pair.disks[0] / folder)[0], stale)
    resumed = finish(*(start(pair, number, folder) for number in range(2)))
    assert states(*resumed) == straight
    assert "resumed from" in resumed[0].err
    assert (f"{pair.work / folder} is shared by all machines" in resumed[0].err) == is_shared
    assert (f"to {HOSTS[1]}, where it is not seen" in resumed[0].err) == (not is_shared)
    assert list((pair.disks[1] / "tmp").iterdir()) == []


def test_a_cut_cable_ends_both_sides_and_damages_nothing(pair: Machines, straight: list[str], tmp_path: Path) -> None:
    marks = tmp_path / "marks"
    marks.mkdir()
    options = ("run", "--marks", marks, "--pause", "0.2", "--heartbeat", "5")
    both = [launch(pair, number, *options) for number in range(2)]
    both[0].wait_for(marks / "rank-0-step-7")
    pair.cut()
    cut = time.monotonic()
    first, second = finish(*both)
    assert max(first.time, second.time) - cut < 60
    assert (first.code, second.code) == (1, 1)
    assert f"rank 1 ({HOSTS[1]}, " in first.err
    assert "has not answered for" in first.err
    assert f"the rendezvous store at {ADDRESSES[0]}:{PORT} has not answered for" in second.err
    for each in (first, second):
        assert f"rank {(first, second).index(each)} (this process) waited in " in each.err
    checkpoints = find_checkpoints(pair.disks[0] / "run")
    assert len(checkpoints) >= 2
    for checkpoint in checkpoints:
        verify(checkpoint)
    pair.mend()
    resumed = finish(*(start(pair, number, "run") for number in range(2)))
    assert states(*resumed) == straight
    assert "resumed from" in resumed[0].err


def test_a_signal_to_one_machine_ends_both_after_one_checkpoint(
    pair: Machines, straight: list[str], tmp_path: Path
) -> None:
    marks = tmp_path / "marks"
    marks.mkdir()
    both = [launch(pair, number, "run", "--marks", marks, "--pause", "0.2") for number in range(2)]
    both[0].wait_for(marks / "rank-1-step-4")
    both[1].process.send_signal(signal.SIGTERM)
    ended = finish(*both)
    assert [each.code for each in ended] == [143, 143], ended
    last = max(int(path.name.rpartition("-")[2]) for path in marks.iterdir())
    assert [path.name for path in find_checkpoints(pair.disks[0] / "run")] == ["checkpoint-3", f"checkpoint-{last}"]
    assert f"left at step {last} of 16" in ended[0].err
    resumed = finish(*(start(pair, number, "run") for number in range(2)))
    assert states(*resumed) == straight


def test_a_rank_that_dies_is_started_anew_on_both_machines(pair: Machines, straight: list[str]) -> None:
    """Twice, since the second time asks whether there was progress, on the machine without the checkpoints."""
    options = ("run", "--deaths", "5", "11")
    ended = finish(*(launch(pair, number, *options, restarts=2) for number in range(2)))
    assert states(*ended) == straight
    assert f"resumed from {pair.work}/run/checkpoint-3 at step 3 of 16" in ended[0].err
    assert f"resumed from {pair.work}/run/checkpoint-9 at step 9 of 16" in ended[0].err
    assert "restart 2 of 2, from the checkpoint of step 9" in ended[1].err


def test_other_arguments_on_a_machine_are_named(pair: Machines) -> None:
    both = [launch(pair, 0, "run"), launch(pair, 1, "run", "--learning-rate", "0.02")]
    for each in finish(*both):
        assert each.code == 1
        assert f"learning_rate differs: 0.02 on rank 1 ({HOSTS[1]}), 0.01 on rank 0 ({HOSTS[0]})" in each.err
    assert not list(pair.disks[0].rglob("checkpoint-*"))


def test_an_address_that_nobody_answers_at_is_named(pair: Machines) -> None:
    (ended,) = finish(start(pair, 1, "run", "--join", "3", address="10.77.0.99"))
    assert ended.code == 1
    assert f"rank 1 found no process at 10.77.0.99:{PORT} within 3 s" in ended.err


def test_a_machine_that_does_not_come_is_named(pair: Machines) -> None:
    (ended,) = finish(start(pair, 0, "run", "--join", "3"))
    assert ended.code == 1
    assert f"rank 1 of 2 did not come to {ADDRESSES[0]}:{PORT} within 3 s" in ended.err
