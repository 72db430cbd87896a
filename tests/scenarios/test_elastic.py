"""Three machines of which some are lost, come again or leave while the others train on."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from scenarios.elastic import Elastic
from scenarios.machine_chaos import rage
from scenarios.machines import ADDRESSES, HOSTS, Ended, finish, made_machines, why_not

from trainer_kit.callbacks import read_log

PREVENTED = why_not()
pytestmark = [pytest.mark.scenario, pytest.mark.slow, pytest.mark.skipif(PREVENTED is not None, reason=str(PREVENTED))]


@pytest.fixture
def elastic(tmp_path: Path) -> Iterator[Elastic]:
    with made_machines(tmp_path, 3) as machines:
        yield Elastic(machines, tmp_path / "shared")


def began(elastic: Elastic) -> float:
    """Time at which the run began."""
    return float(read_log(elastic.run / "log.jsonl")[0]["began"])


@pytest.mark.parametrize("moment", ["step", "exchange", "save", "evaluation"])
def test_a_machine_is_killed(elastic: Elastic, moment: str) -> None:
    """The others go on in their processes: between votes, while gradients are summed, a checkpoint is written, or each
    process evaluates its share.
    """
    commands = elastic.start_all(pause=0.1, dies=moment, copies=moment == "exchange")
    ended = finish(*commands[:2])
    elastic.check(*ended)
    assert f"{HOSTS[2]} is gone: 2 of 3 machines continue" in ended[1].err
    assert "continued with 2 processes instead of 3 at step" in ended[0].err
    assert len(elastic.processes()) == 3, "no process was started a second time"
    assert {json.loads(each.out)["pid"] for each in ended} < elastic.processes()
    assert "; restart " not in ended[0].err + ended[1].err, "it is no failure"
    assert not list(elastic.run.glob("crash*"))
    (lost,) = elastic.memberships()
    sizes = [lost[name] for name in ("machines_before", "machines", "processes_before", "processes")]
    assert (sizes, lost["lost"], lost["joined"]) == ([3, 2, 3, 2], [HOSTS[2]], [])
    again = int(moment in ("exchange", "save"))
    assert (lost["number"], lost["step"], lost["again"], lost["in_process"]) == (2, 6, again, True)
    assert 0 < lost["pause"] < 30
    assert lost["cause"]
    line = next(line for line in ended[0].err.splitlines() if "finished: " in line)
    assert f"1 machine lost, {lost['pause']:.2g} s of regrouping, {again} step" in line
    summary = next(record for record in read_log(elastic.run / "log.jsonl") if "wall_seconds" in record)
    missing = 1 / 3 * (1 - (lost["time"] - began(elastic)) / summary["wall_seconds"])
    assert summary["reduced_seconds"] / summary["wall_seconds"] == pytest.approx(missing, abs=0.05)
    assert summary["seconds/regroup"] == pytest.approx(lost["pause"], rel=0.1, abs=0.1)
    if moment == "evaluation":  # of which each process was to read 50 samples, and the lost one read 5
        read = [json.loads(each.out)["read"] for each in ended]
        assert max(read) < 30, read
        steps = [each["step"] for each in read_log(elastic.run / "log.jsonl") if each["event"] == "evaluate"]
        assert steps == sorted({*steps})
        assert steps[0] == 6
    if moment == "exchange":  # copies to peers were given up with the broken group, and went on in the next one
        assert ended[0].err.count("was not copied to memory") <= 1, ended[0].err
        for disk in elastic.machines.disks[:2]:
            assert list((disk / "memory").iterdir()) == []
        first, second = (json.loads(each.out)["copied"] for each in ended)
        assert first == second
        assert all(int(name[:8]) > 6 for name in first), first
        assert len(first) == 2
        assert list((elastic.machines.disks[2] / "memory").iterdir()) != []


def test_the_state_goes_on_as_from_a_checkpoint(elastic: Elastic) -> None:
    """With dropout, batch norm, a schedule and averaged weights, after a break in a backward pass: the same bits."""
    settings: dict[str, Any] = {"model": "noisy", "batch_size": 3}  # a batch norm takes no share of one sample
    commands = elastic.start_all(**settings, pause=0.2, dies="exchange")
    elastic.wait_for_text("continued with 2 processes instead of 3 at step 6", commands[0])
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


def test_a_lost_machine_is_no_failure_of_new_processes_either(elastic: Elastic) -> None:
    """Sharded weights are lost with the machine; the launchers may restart after no failure at all."""
    commands = elastic.start_all(fsdp=True, model="noisy", batch_size=3, pause=0.1, dies="step", restarts="0")
    ended = finish(*commands[:2])
    assert [each.code for each in ended] == [0, 0], [each.err for each in ended]
    errors = ended[0].err + ended[1].err
    assert f"; lost: {HOSTS[2]}; restart, which --max-restarts does not count" in errors
    assert f"{HOSTS[2]} is gone: 2 of 3 machines continue" in ended[0].err
    assert len(elastic.processes()) == 5
    first, second = (json.loads(each.out) for each in ended)
    assert first["step"] == second["step"]
    (lost,) = elastic.memberships()
    assert (lost["lost"], lost["in_process"]) == ([HOSTS[2]], False)


def test_two_machines_are_killed_within_a_second(elastic: Elastic) -> None:
    commands = elastic.start_all(nodes="1:3")
    elastic.machines.kill(2)
    time.sleep(0.7)
    elastic.machines.kill(1)
    (ended,) = finish(commands[0])
    elastic.check(ended)


def test_machines_are_killed_in_the_vote_in_the_meeting_and_in_healing(tmp_path: Path) -> None:
    """One after another, so that the two that are left go on in their processes after all three."""
    deaths = [(4, "vote"), (3, "meeting"), (2, "healing")]
    with made_machines(tmp_path, 5) as machines:
        elastic = Elastic(machines, tmp_path / "shared")
        commands = elastic.start_all(nodes="2:5", pause=0.1, deaths=deaths, last_call=60)
        ended = finish(*commands[:2])
    elastic.check(*ended)
    died = {path.name for path in elastic.marks.parent.glob("died-in-*")}
    assert died == {f"died-in-{moment}" for _, moment in deaths}
    assert len(elastic.processes()) == 5, "no process was started a second time"
    assert {json.loads(each.out)["pid"] for each in ended} < elastic.processes()
    for each in ended:
        gone = re.findall(r"([\w, -]+) (?:is|are) gone: (\d) of 5 machines continue", each.err)
        *first, last = [name for names, _ in gone for name in names.strip().split(", ")]
        assert ({*first}, last, gone[-1][1]) == ({HOSTS[3], HOSTS[4]}, HOSTS[2], "2")
        assert "; restart " not in each.err, "it is no failure"
    (lost,) = elastic.memberships()
    assert (lost["lost"], lost["in_process"]) == ([*HOSTS[2:]], True)
    assert "has left the run;" not in lost["cause"], "one that goes on is not the cause"
    assert (lost["step"], lost["again"]) == (6, 0)


def test_a_killed_machine_comes_back(elastic: Elastic) -> None:
    commands = elastic.start_all()
    elastic.machines.kill(2)
    elastic.wait_for_text("2 processes keep 6 samples a step: 3 each instead of 2", commands[0])
    commands[2] = elastic.start(2)
    elastic.wait_for_text(f"{HOSTS[2]} joins: the run continues with it", commands[0])
    ended = finish(*commands)
    elastic.check(*ended)
    assert len(elastic.processes()) == 4, "the others have stayed in their processes"
    assert {json.loads(each.out)["state"] for each in ended} == {json.loads(ended[0].out)["state"]}
    assert "3 processes keep 6 samples a step: 2 each instead of 3" in ended[0].err
    assert f"{HOSTS[2]} has joined: 3 of 3 machines continue" in ended[1].err
    lost, joined = elastic.memberships()
    assert (lost["lost"], lost["processes"], joined["joined"], joined["processes"]) == ([HOSTS[2]], 2, [HOSTS[2]], 3)
    assert (joined["again"], joined["in_process"], joined["cause"]) == (0, True, "")
    assert 0 < joined["pause"] < 30
    assert "1 machine lost, 1 came again, " in ended[0].err
    assert "; restart " not in ended[0].err + ended[1].err


def test_a_machine_that_has_joined_goes_on_alone(elastic: Elastic) -> None:
    """It has taken from the other one all that the run needs: samples, log, checkpoints and memberships."""
    elastic.candidates = 2
    commands = [elastic.start(number, nodes="1:2") for number in range(2)]
    elastic.wait_for_step(5, commands[0])
    elastic.machines.kill(1)
    elastic.wait_for_text("continued with 1 process instead of 2 at step", commands[0])
    commands[1] = elastic.start(1, nodes="1:2")
    elastic.wait_for_text("2 processes instead of 1 from step", commands[0])
    elastic.wait_for_step(max(elastic.steps()) + 2, commands[0])  # the first one with the new process takes longer
    time.sleep(0.15)  # while both rest after a step: in an optimizer's step, new processes would have to resume
    elastic.machines.kill(0)
    (ended,) = finish(commands[1])
    elastic.check(ended)
    assert len(elastic.processes()) == 3, ended.err
    changes = [(each["processes_before"], each["processes"], each["in_process"]) for each in elastic.memberships()]
    assert changes == [(2, 1, True), (1, 2, True), (2, 1, True)]
    assert "this process is the main one now" in ended.err
    assert "finished: 2 machines lost, 1 came again, " in ended.err
    last = json.loads(ended.out)["step"]
    assert (elastic.run / f"checkpoint-{last}").is_dir()


@pytest.mark.parametrize("silent", ["cable", "cable of the store", "stopped"])
def test_a_machine_falls_silent_and_comes_back(silent: str, elastic: Elastic) -> None:
    """Long enough for TCP, which tries again after ever longer pauses. It joins as a new machine does."""
    elastic.candidates, number = 3, 0 if silent == "cable of the store" else 2
    commands = elastic.start_all(pause=1.5)
    if silent == "stopped":
        elastic.machines.signal(number, signal.SIGSTOP)
    else:
        elastic.machines.cut(number)
    others = [command for place, command in enumerate(commands) if place != number]
    elastic.wait_for_text(f"{HOSTS[number]} is gone: 2 of 3 machines continue", *others)
    elastic.wait_for_text("continued with 2 processes instead of 3", *others)
    if silent == "stopped":
        elastic.machines.signal(number, signal.SIGCONT)
    else:
        elastic.machines.mend(number)
    elastic.wait_for_text(f"{HOSTS[number]} joins: the run continues with it", *commands)
    ended = finish(*commands)
    elastic.check(*ended)
    assert len(elastic.processes()) == 4, "\n".join(each.err for each in ended)
    lost, joined = elastic.memberships()
    assert (lost["lost"], joined["joined"]) == ([HOSTS[number]], [HOSTS[number]])
    assert (lost["in_process"], joined["in_process"]) == (True, True)
    assert 8 < lost["pause"] < 60, "from the last step on"
    assert joined["pause"] < 8
    assert "exception" not in {record["event"] for record in read_log(elastic.run / "log.jsonl")}, "others own the log"


def test_the_machine_with_the_store_is_killed_and_comes_back(elastic: Elastic) -> None:
    """The folder's lock of its main process must not hold the others up."""
    commands = elastic.start_all(preloaded=False)
    elastic.machines.kill(0)
    elastic.wait_for_text("waiting for the first machine at", commands[1])
    commands[0] = elastic.start(0)
    ended = finish(*commands)
    elastic.check(*ended)
    assert not any("frame #" in each.err or "waiting to see whether it continues" in each.err for each in ended)


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
    assert f"{HOSTS[1]} leaves: the run saves and continues without it" in third.err
    left = first.err.partition("left at step ")[2].split()[0]
    assert f"checkpoint-{left} at step {left} of" in first.err, "nothing is done twice"
    assert "; restart " not in first.err + third.err, "it is no failure"


@pytest.fixture
def four(tmp_path: Path) -> Iterator[Elastic]:
    with made_machines(tmp_path, 4) as machines:
        yield Elastic(machines, tmp_path / "shared")


def test_the_next_candidate_serves_the_store(four: Elastic) -> None:
    """Both that served it are killed in turn, the first with the main process, which was writing a checkpoint."""
    four.candidates = 3
    commands = four.start_all(nodes="1:4", deaths=[(0, "save"), (1, "second")])
    ended = finish(*commands[2:])
    four.check(*ended)
    errs = "\n".join(command.err.read_text() for command in commands)
    for continued in ("with 3 processes instead of 4 at step 6", "with 2 processes instead of 3 at step 8"):
        assert f"continued {continued}" in errs, errs
    assert all(f"{HOSTS[1]} is gone: 2 of 4 machines continue" in each.err for each in ended)
    assert len(four.processes()) == 4, "no process was started a second time"
    assert {json.loads(each.out)["pid"] for each in ended} < four.processes()
    steps = {record["step"] for record in read_log(four.run / "log.jsonl") if "learning_rate" in record}
    last = json.loads(ended[0].out)["step"]
    assert last in steps
    assert len(steps) >= last - 4, "a new main process logs, but for the steps whose losses were lost"
    manifest = json.loads((four.run / f"checkpoint-{last}" / "manifest.json").read_text())
    assert (manifest["membership"], manifest["world_size"]) == (3, 2)
    assert {each.name.partition("-")[2][0] for each in four.run.glob(".membership-*")} == {"2", "3"}
    assert not list(four.run.glob(".staging-*"))


def test_a_split_network_trains_on_one_side(tmp_path: Path) -> None:
    """The machines of each side reach one another, each side can serve a store, and would go on in its processes.

    Two runs at the same time, since they mostly wait: one in a shared folder, one on disks of the machines.
    """
    reasons = {"shared": "belongs to membership {} of this run", "own": "is not the folder of the last main process"}
    with contextlib.ExitStack() as stack:
        runs = dict[str, Elastic]()
        for name in reasons:
            (tmp_path / name).mkdir()
            machines = stack.enter_context(made_machines(tmp_path / name, 4))
            runs[name] = Elastic(machines, tmp_path / name / "shared")
            runs[name].candidates = 4
        runs["own"].run = Path("run")
        for run in runs.values():
            for number in range(4):
                run.start(number, nodes="1:4", pause=0.2, timeout=16, heartbeat=3, last_call=3)
        for run in runs.values():
            run.wait_for_step(5, run.commands[0])
            run.machines.split(2)
        for name, run in runs.items():
            check_split(run, finish(*run.commands), reasons[name])
        for disk in runs["own"].machines.disks[1:]:
            assert not list((disk / "run").glob("checkpoint-*")), "the first machine has them"


def check_split(run: Elastic, ended: list[Ended], reason: str) -> None:
    """One side has trained each sample once, the other one has ended without another step or checkpoint."""
    sides = [{each.code for each in ended[:2]}, {each.code for each in ended[2:]}]
    assert sorted(map(sorted, sides)) == [[0], [75]], "\n".join(each.err for each in ended)
    goes_on = sides.index({0}) * 2
    right, wrong = ended[goes_on : goes_on + 2], ended[2 - goes_on : 4 - goes_on]
    run.check(*right)
    assert {json.loads(each.out)["pid"] for each in right} < run.processes()
    assert len(run.processes()) == 4, "no process was started a second time"
    number = run.memberships()[-1]["number"] if run.run.is_absolute() else None  # 3 if one came after the last call
    for each in wrong:
        assert ": the others may still be training; stopped, start again to join them" in each.err
        assert reason.format(number) in each.err
        assert "continued with" not in each.err
        assert "this process is the main one now" not in each.err
    if run.run.is_absolute():
        assert "exception" not in {record["event"] for record in read_log(run.run / "log.jsonl")}, "others own the log"


def test_the_side_that_waited_joins_when_the_network_is_mended(four: Elastic) -> None:
    four.candidates = 4
    commands = four.start_all(nodes="1:4", pause=0.5, heartbeat=3)
    four.machines.split(2)
    four.wait_for_text("continued with 2 processes instead of 4", *commands)
    four.machines.rejoin(2)
    ended = finish(*commands)
    four.check(*ended)
    errs = [each.err for each in ended]
    assert any("joined: 4 of 4 machines continue" in err for err in errs), errs  # at the same time, or one by one


@pytest.mark.parametrize(
    ("told", "pauses"),
    [((0,), (0,)), ((0, 1, 2), (0, 0, 0)), ((2, 1, 0), (0, 0, 0)), ((1, 0, 2), (0.05, 0.8, 0))],
    ids=str,
)
def test_the_run_leaves_when_told(elastic: Elastic, told: tuple[int, ...], pauses: tuple[float, ...]) -> None:
    """Also the last machine, which waits for a place while the others leave, or saves since one of them does."""
    commands = elastic.start_all()
    for number, pause in zip(told, pauses, strict=True):
        commands[number].process.send_signal(signal.SIGTERM)
        time.sleep(pause)
    ended = finish(*commands)
    assert [each.code for each in ended] == [143] * 3, [each.err for each in ended]
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
    elastic.wait_for_text(f"{HOSTS[1]} is gone: 2 of 3 machines continue", commands[0])
    elastic.wait_for_text("continued with 2 processes instead of 3", commands[0])
    subprocess.run(["kill", "-CONT", *found], check=True)
    elastic.check(*finish(*commands))


def test_whenever_machines_are_lost_each_sample_is_used_once(tmp_path: Path) -> None:
    """See `machine_chaos`, which runs longer by hand."""
    rage(tmp_path, kills=4, seed=1)
