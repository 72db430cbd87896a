"""Real processes that are stopped, killed, or misbehave, and what the others say of them."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from kit import watched
from kit.clock import Clock
from kit.forked import fork_server
from kit.ranks import free_port

from trainer_kit.strategies.process_group import default_patience
from trainer_kit.strategies.watchdog import heartbeat, peers
from trainer_kit.strategies.watchdog.stack import StackLocation

pytestmark = [
    pytest.mark.scenario,
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals"),
]

LIMIT = 90


class Run:
    """Processes of a run, and what they have left."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.processes: list[BaseProcess] = []
        self.store: dist.TCPStore | None = None

    def start(self, world_size: int, what: Callable[..., None], **options: Any) -> None:
        port = free_port()
        if not options.get("first_serves"):
            self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            port = self.store.port
        context = fork_server()
        for rank in range(world_size):
            arguments = (rank, world_size, port, self.folder, what.__name__, options)
            self.processes.append(context.Process(target=watched.run, args=arguments, daemon=True))
            self.processes[-1].start()

    def wait_until_ready(self) -> None:
        for rank in range(len(self.processes)):
            wait_until((self.folder / f"ready-{rank}").exists, lambda: self.errors(0) + self.errors(1))

    def signal(self, rank: int, number: signal.Signals) -> None:
        pid = self.processes[rank].pid
        assert pid is not None
        os.kill(pid, number)

    def exit_code(self, rank: int) -> int | None:
        self.processes[rank].join(LIMIT)
        return self.processes[rank].exitcode

    def errors(self, rank: int) -> str:
        file = self.folder / f"errors-{rank}"
        return file.read_text() if file.exists() else ""

    def name(self, rank: int) -> str:
        return f"process {self.processes[rank].pid})"

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()


def wait_until(true: Callable[[], bool], what: Callable[[], str]) -> None:
    end = time.monotonic() + LIMIT
    while not true():
        assert time.monotonic() < end, what()
        time.sleep(0.02)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    run = Run(tmp_path)
    yield run
    run.end()


def last_line(text: str) -> str:
    return text.strip().splitlines()[-1]


@pytest.mark.parametrize("frozen", [0, 1])
def test_a_frozen_process_is_named_by_all_others(run: Run, frozen: int) -> None:
    run.start(3, watched.trains)
    run.wait_until_ready()
    run.signal(frozen, signal.SIGSTOP)
    for rank in {0, 1, 2} - {frozen}:
        assert run.exit_code(rank) == 1, run.errors(rank)
        sentence = last_line(run.errors(rank))
        assert f"rank {frozen} (" in sentence
        assert run.name(frozen) in sentence
        assert "stopped" in sentence
        assert f"rank {rank} (this process) waited in " in sentence
        assert "(kit/watched.py:" in sentence
        left = (
            json.loads((run.folder / f"error-{rank}.json").read_text()) if "Traceback" not in run.errors(rank) else {}
        )
        assert not left or sentence in left["message"]["message"]
    assert run.processes[frozen].is_alive()


def test_a_frozen_process_on_another_machine_is_named(run: Run) -> None:
    run.start(2, watched.trains, hosts=["north", "south"])
    run.wait_until_ready()
    run.signal(1, signal.SIGSTOP)
    assert run.exit_code(0) == 1
    sentence = last_line(run.errors(0))
    assert sentence.startswith(f"rank 1 (south, {run.name(1)} has not answered for "), run.errors(0)
    assert "; rank 0 (this process) waited in all_reduce, called in reduce (kit/watched.py:" in sentence
    left = json.loads((run.folder / "error-0.json").read_text())["message"]  # what torchrun's agent prints
    assert left["message"] == left["extraInfo"]["py_callstack"] == f"LostProcessError: {sentence}"


def test_an_engine_that_waits_for_a_gpu_is_ended_too(run: Run) -> None:
    run.start(2, watched.waits_for_a_gpu)
    run.wait_until_ready()
    run.signal(1, signal.SIGSTOP)
    assert run.exit_code(0) == 1
    sentence = last_line(run.errors(0))
    assert f"{run.name(1)} has not answered for " in sentence
    assert "; rank 0 (this process) was in item (loop/step_metrics.py:2), after 5 steps" in sentence


@pytest.mark.parametrize("first_serves", [False, True])
def test_who_needs_nobody_works_on_and_ends(run: Run, first_serves: bool) -> None:
    run.start(2, watched.works_on, first_serves=first_serves)
    run.wait_until_ready()
    run.signal(0, signal.SIGSTOP)
    assert run.exit_code(1) == 0
    assert run.errors(1) == ""


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_a_store_that_is_lost_with_its_process(run: Run, number: signal.Signals) -> None:
    run.start(2, watched.trains, first_serves=True)
    run.wait_until_ready()
    run.signal(0, number)
    assert run.exit_code(1) == 1
    sentence = last_line(run.errors(1))
    assert "rank 0 (" in sentence
    assert run.name(0) in sentence
    if number == signal.SIGSTOP:
        assert sentence.startswith("the rendezvous store at 127.0.0.1:")
        assert "(it is stopped)" in sentence


def test_a_killed_process_is_named_in_an_exception(run: Run) -> None:
    run.start(2, watched.trains)
    run.wait_until_ready()
    run.signal(1, signal.SIGKILL)
    assert run.exit_code(0) == 1
    sentence = last_line(run.errors(0))
    assert sentence.startswith("trainer_kit.errors.LostProcessError: rank 1 (")
    assert f"{run.name(1)} has ended without a message; rank 0 (this process) waited in " in sentence


def test_a_process_that_exits_without_a_word_is_named(run: Run) -> None:
    run.start(2, watched.exits_without_a_word)
    assert run.exit_code(0) == 1
    assert f"{run.name(1)} has ended without a message; " in last_line(run.errors(0))


def test_a_failed_process_is_named_with_its_error(run: Run) -> None:
    run.start(3, watched.fails)
    for rank in (0, 2):
        assert run.exit_code(rank) == 1
        sentence = last_line(run.errors(rank))
        assert "LostProcessError: rank 1 (" in sentence
        assert f"{run.name(1)} failed: ValueError: sample 7 is no number; rank {rank} (this process) " in sentence


@pytest.mark.parametrize("first_serves", [False, True])
def test_connections_that_stay_open_do_not_hide_a_failure(run: Run, first_serves: bool) -> None:
    run.start(3, watched.fails_and_stays, first_serves=first_serves)
    for rank in (0, 2):
        assert run.exit_code(rank) == 1
        assert f"{run.name(1)} failed: ValueError: sample 7 is no number; " in last_line(run.errors(rank))


def test_a_process_that_left_in_good_order_is_missed_where_it_is_waited_for(run: Run) -> None:
    run.start(2, watched.leaves_and_stays)
    assert run.exit_code(0) == 1
    sentence = last_line(run.errors(0))
    assert f"{run.name(1)} has left the run; rank 0 (this process) waited in all_reduce, called in " in sentence
    assert sentence.endswith(", after 5 steps")


def test_one_that_left_since_it_missed_another_is_not_taken_for_the_cause(run: Run) -> None:
    run.start(3, watched.breaks_off_and_stays)
    assert run.exit_code(0) == 1
    sentence = last_line(run.errors(0))
    assert f"{run.name(1)} has left the run, in which it missed another process; rank 0 (this process) " in sentence


@pytest.mark.parametrize("first_serves", [False, True])
def test_a_process_that_left_in_good_order_is_not_missed_by_others(run: Run, first_serves: bool) -> None:
    run.start(2, watched.leaves_while_others_work, first_serves=first_serves)
    for rank in range(2):
        assert run.exit_code(rank) == 0
        # torch itself logs a connection that breaks just as it is used, with the frames of its own code.
        assert re.sub(r"\[rank1\]:\[W.*?TCPStore.*?\n\n", "", run.errors(rank), flags=re.DOTALL) == ""


def test_one_that_sleeps_is_named_in_a_warning_and_when_the_collective_ends(run: Run) -> None:
    run.start(3, watched.sleeps, timeout=5)
    for rank in (0, 2):
        assert run.exit_code(rank) == 1
        sentence = last_line(run.errors(rank))
        # The second one to end may have heard by then that the first one did, and why.
        assert re.search(rf"LostProcessError: (rank {2 - rank} \([^)]*\) ended: )?rank 1 \(", sentence), sentence
        assert " s in sleep_for_ever (kit/watched.py:" in sentence
        assert f"{run.name(2 - rank)} has" not in sentence
    warnings = [line for line in run.errors(0).splitlines() if line.startswith("WARNING rank 1 (")]
    assert 1 <= len(warnings) <= 4
    assert " s in sleep_for_ever (kit/watched.py:" in warnings[0]
    assert ", while rank " in warnings[0]
    assert " in all_reduce, called in reduce (kit/watched.py:" in warnings[0]
    assert "WARNING" not in run.errors(2)


# With several machines it is the others of the same one that see it run.
@pytest.mark.parametrize(
    ("what", "hosts"),
    [
        (watched.holds_the_interpreter, None),
        (watched.holds_the_interpreter, ["north", "south", "south"]),
        (watched.first_holds_the_interpreter, ["north", "south", "north"]),
    ],
)
def test_one_that_holds_its_interpreter_is_not_lost(run: Run, what: Callable[..., None], hosts: Any) -> None:
    run.start(2 if hosts is None else 3, what, hosts=hosts)
    for rank in range(len(run.processes)):
        assert run.exit_code(rank) == 0, run.errors(rank)
        assert "not answered" not in run.errors(rank)
    if what is watched.holds_the_interpreter:
        assert "; it runs, but does not answer" in run.errors(0)


def test_a_run_that_is_stopped_and_continued_goes_on(run: Run) -> None:
    run.start(2, watched.trains, hosts=["north", "south"], patience=2.5)  # nobody sees whether the other one runs
    run.wait_until_ready()
    for rank in range(2):
        run.signal(rank, signal.SIGSTOP)
    time.sleep(4)
    for rank in range(2):
        run.signal(rank, signal.SIGCONT)
        time.sleep(watched.SLOW / 2)  # one that waits longer warns
    time.sleep(watched.PATIENCE)
    (run.folder / "end").touch()
    for rank in range(2):
        assert run.exit_code(rank) == 0
        assert run.errors(rank) == ""


@pytest.mark.parametrize("watches_first", [False, True])
def test_time_in_which_processes_are_stopped_makes_nobody_slow(
    watches_first: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Rank 2 is not stopped, and waits. Which of the two threads of the others goes on first is chance."""
    clock = Clock()
    wheres = [
        StackLocation("all_reduce", waits=True),
        StackLocation("load (project/data.py:2)"),
        StackLocation("all_reduce", waits=True),
    ]
    for each in (heartbeat, peers):
        monkeypatch.setattr(each, "time", clock)
    store = dist.HashStore()
    first, second, third = (heartbeat.Heartbeat(store, rank, 3, interval=1, patience=10, slow=60) for rank in range(3))

    def look(process: heartbeat.Heartbeat) -> None:
        monkeypatch.setattr(heartbeat, "locate", lambda *frames, hidden: wheres[process.rank])
        process._look()

    def talk(process: heartbeat.Heartbeat) -> None:
        process._beats += 1
        process._exchange()

    def pass_seconds(number: int, *processes: heartbeat.Heartbeat) -> None:
        for _ in range(number):
            clock.now += 1
            for process in processes:
                look(process)
                talk(process)

    pass_seconds(5, third, second, first)
    pass_seconds(100, third)
    for process in (first, second):
        if watches_first:
            look(process)
        talk(process)
    pass_seconds(50, third, second, first)
    assert caplog.text == ""
    pass_seconds(20, third, second, first)
    assert "rank 1 (" in caplog.text
    assert " has been for 1 min in load (project/data.py:2), while rank " in caplog.text


def seconds_until_found(frozen: int, phases: list[float]) -> list[float]:
    """Seconds from the stop of a process until each of two others ends, with the default times of a run.

    Args:
        frozen: Which of three processes stops.
        phases: By how many seconds the threads are apart: each process's talking one, then each one's watching one.
    """
    clock, store = Clock(), dist.HashStore()
    with pytest.MonkeyPatch.context() as patch:
        for each in (heartbeat, peers):
            patch.setattr(each, "time", clock)
        patch.setattr(heartbeat, "locate", lambda *frames, hidden: StackLocation("all_reduce", waits=True))
        patch.setattr(heartbeat, "machine", lambda: ("another machine", 1))  # the system does not say how it is
        patience = default_patience()
        processes = [heartbeat.Heartbeat(store, rank, 3, patience=patience) for rank in range(3)]
        turns = [(clock.now + phase, number) for number, phase in enumerate(phases)]
        stop, found = clock.now + 20, dict[int, float]()
        while len(found) < 2:
            clock.now, number = min(turns)
            process = processes[number % 3]
            if clock.now >= stop and process.rank == frozen:
                turns[number] = (math.inf, number)
                continue
            if number < 3:
                process._beats += 1
                process._exchange()
            else:
                process._look()
                if process._finding() is not None:
                    found.setdefault(process.rank, clock.now - stop)
            turns[number] = (clock.now + process._pause(), number)
        return list(found.values())


@settings(max_examples=60, deadline=None)
@given(frozen=st.integers(0, 2), phases=st.lists(st.floats(0, 5), min_size=6, max_size=6))
def test_a_stopped_process_is_found_soon_after_its_time_is_over(frozen: int, phases: list[float]) -> None:
    for seconds in seconds_until_found(frozen, phases):
        assert 30 <= seconds + 5 <= 50, "a beat may be 5 seconds old when the process stops"


def test_all_hear_that_one_is_told_to_leave(run: Run) -> None:
    run.start(2, watched.is_told_to_leave)
    run.wait_until_ready()
    time.sleep(2 * watched.INTERVAL)
    assert all(process.is_alive() for process in run.processes)
    run.signal(1, signal.SIGUSR1)
    for rank in range(2):
        assert run.exit_code(rank) == 0, run.errors(rank)


@pytest.mark.parametrize("first_serves", [False, True])
def test_messages_come_to_the_first_process(run: Run, first_serves: bool) -> None:
    run.start(3, watched.sends_messages, first_serves=first_serves)
    for rank in range(3):
        assert run.exit_code(rank) == 0, run.errors(rank)


@pytest.mark.parametrize("first_serves", [False, True])
def test_what_a_process_sends_as_its_last_duty_is_received(run: Run, first_serves: bool) -> None:
    run.start(3, watched.sends_as_its_last_duty, first_serves=first_serves)
    run.wait_until_ready()
    run.signal(1, signal.SIGSTOP)
    for rank in (0, 2):
        assert run.exit_code(rank) == 1, run.errors(rank)
        assert "rank 1 (" in last_line(run.errors(rank))
    assert (run.folder / "received").read_text() == "['text', None]"


def test_a_collective_that_waits_for_a_frozen_process_is_woken(run: Run) -> None:
    run.start(3, watched.is_woken)
    run.wait_until_ready()
    run.signal(1, signal.SIGSTOP)
    for rank in (0, 2):
        assert run.exit_code(rank) == 0, run.errors(rank)
        assert "waited in " in (run.folder / f"woken-{rank}").read_text()


def test_a_forked_child_says_nothing(run: Run) -> None:
    run.start(2, watched.forks)
    for rank in range(2):
        assert run.exit_code(rank) == 0, run.errors(rank)


def test_an_uncaught_error_of_the_process_that_serves_the_store_is_heard(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys, atexit\n"
        "from pathlib import Path\n"
        "from kit import watched\n"
        "rank, port = int(sys.argv[1]), int(sys.argv[2])\n"
        "member = watched.Member(rank, 2, port, Path(sys.argv[0]).parent, rank == 0, interval=3, patience=12)\n"
        "if rank == 0:\n"
        "    atexit.register(os._exit, 1)  # right after that:\n"
        "atexit.register(member.heartbeat.stop)\n"
        "member.train(5)\n"
        "if rank == 0:\n"
        "    raise ValueError('sample 7 is no number')\n"
        "member.reduce()\n"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    port = str(free_port())
    processes = [
        subprocess.Popen([sys.executable, script, str(rank), port], stderr=subprocess.PIPE, text=True, env=environment)
        for rank in range(2)
    ]
    try:
        errors = [process.communicate(timeout=LIMIT)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [1, 1]
    assert last_line(errors[0]).endswith("ValueError: sample 7 is no number")
    assert f"process {processes[0].pid}) failed: ValueError: sample 7 is no number; rank 1 " in last_line(errors[1])
