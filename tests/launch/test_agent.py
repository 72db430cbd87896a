"""Test the launcher's agent: what it takes the end of a rank for, and whom it goes on with."""

from __future__ import annotations

import signal
import sys
import time
from collections import deque
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from kit.meetings import Meetings, together
from torch.distributed.elastic.agent.server.api import WorkerSpec, WorkerState

from trainer_kit.config import environment
from trainer_kit.errors import ProcessFailed
from trainer_kit.launch import machines
from trainer_kit.launch.agent import Agent
from trainer_kit.launch.config import LaunchConfig
from trainer_kit.launch.failures import Failure
from trainer_kit.launch.link import RunEndedError
from trainer_kit.launch.machines import Machines
from trainer_kit.launch.news import Change, News
from trainer_kit.launch.output import OutputFiles
from trainer_kit.launch.processes import run_processes
from trainer_kit.launch.restart_limit import RestartLimit


def test_a_rank_that_fails_between_two_questions_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent asks for exit codes, then for news of other machines, which can take longer than the rank lives."""
    monkeypatch.setattr(Machines, "news", lambda self, at_once=False: time.sleep(1))
    words = ["-c", "import time; time.sleep(0.4); raise ValueError('late')"]
    with pytest.raises(ProcessFailed, match=r"rank 0 on .* left with exit code 1"):
        run_processes(LaunchConfig(num_processes=1, cpu=True), sys.executable, words)


@pytest.fixture
def meetings(monkeypatch: pytest.MonkeyPatch) -> Iterator[Meetings]:
    monkeypatch.setenv(environment.MEMBERSHIP, "")
    meetings = Meetings()
    yield meetings
    meetings.close()


def agent(meetings: Meetings, number: int, folder: Path) -> Agent:
    """The agent of a machine, which starts no rank."""
    rendezvous: Any = meetings.machine(number)
    spec = WorkerSpec("trainer_kit", 1, rendezvous, entrypoint=sys.executable, max_restarts=0)
    channel = Machines(rendezvous._config, rendezvous)
    return Agent(
        spec, RestartLimit(0), OutputFiles(folder, folder, None), "spawn", channel, deque(), meetings.said.append
    )


def meet(each: Agent) -> str:
    """Return what has ended the run; "" if it goes on."""
    try:
        each._rendezvous(each._worker_group)
    except (ProcessFailed, RunEndedError) as failure:
        each._machines.rendezvous.leave(failure)
        return str(failure)
    except BaseException as error:
        each._machines.rendezvous.leave(error)  # the others wait for it
        raise
    return ""


def test_failures_of_all_machines_count_wherever_they_were_seen(meetings: Meetings, tmp_path: Path) -> None:
    agents = [agent(meetings, number, tmp_path) for number in range(3)]
    for host in ("b", "c", "b"):
        agents[2]._failures.record(host)
    together(*(partial(meet, each) for each in agents))
    for each in agents:
        assert [failure.host for failure in each._failures.past()] == ["b", "c", "b"]


@pytest.mark.parametrize(
    ("words", "stays"),
    [
        (["run/1", "run/1", "run/1"], True),
        (["run/1", "run/1", "new/digest"], True),
        (["run/1", "new/digest", "new/digest"], True),
        (["run/1", "run/2", "new/digest"], False),
        (["run/1", "", "new/digest"], False),
        (["run/1", "run/1", ""], False),
        (["new/digest"] * 3, False),
        ([""] * 3, False),
    ],
)
def test_ranks_stay_where_all_others_have_left_one_membership_or_are_newcomers(
    words: list[str], stays: bool, meetings: Meetings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    agents = [agent(meetings, number, tmp_path) for number in range(3)]
    for each, left in zip(agents, words, strict=True):
        monkeypatch.setattr(each, "_left", lambda left=left: left or None)
    assert together(*(partial(meet, each) for each in agents)) == [""] * 3
    assert [each._stays for each in agents] == [stays] * 3
    assert [each._machines.rendezvous.stays for each in agents] == [left != "" for left in words]


@pytest.mark.parametrize("is_open", [True, False], ids=["stay", "end"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, None])
def test_a_machine_that_was_to_leave_when_its_ranks_met_the_others_leaves_after_that(
    number: int | None, is_open: bool, meetings: Meetings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its ranks have a place before they obey the signal; or new ones would have to start."""
    agents = [agent(meetings, number, tmp_path / str(number)) for number in range(3)]
    monkeypatch.setattr(Agent, "_ranks", SimpleNamespace(wait=lambda seconds: None))
    for place, each in enumerate(agents):
        (tmp_path / str(place)).mkdir()
        left = "run/1" if is_open or place else ""
        monkeypatch.setattr(each, "_left", lambda left=left: left)
    leaving, *others = agents[2], *agents[:2]
    leaving._passed_on = number
    states = together(*(partial(each._regroup, each._worker_group) for each in agents))
    assert {result.state for result in states} == {WorkerState.HEALTHY if is_open else WorkerState.FAILED}
    goes_on = is_open or number is None
    assert leaving._passed_on == number
    assert leaving.exit_code == (None if goes_on else 130 if number == signal.SIGINT else 143)
    assert (leaving._remaining_restarts > 0) == (not is_open and number is None)
    changes = {change and change.text.partition(" ")[2] for change in (each._machines.change() for each in others)}
    assert changes == {"leaves: the run saves and continues without it" if number == signal.SIGTERM else None}


@pytest.mark.parametrize("failed", [2, 0], ids=["a machine", "the machine with the store"])
def test_machines_on_their_way_hear_that_a_failure_has_ended_the_run(
    failed: int, meetings: Meetings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They have lost a rank and wait for the others, when the failure is announced; one that joins them hears of it."""
    monkeypatch.setattr(machines, "_PARTING_SECONDS", 0.1)
    agents = [agent(meetings, number, tmp_path) for number in range(3)]
    assert together(*(partial(meet, each) for each in agents)) == [""] * 3
    assert sum("3 of 3 machines, 2 are enough" in line for line in meetings.said) == 3
    meetings.said.clear()

    def fail() -> str:
        time.sleep(0.5)  # the others are on their way
        channel = agents[failed]._machines
        channel.announce(ProcessFailed("rank 7 failed", 7, 1), goes_on=False)
        channel.rendezvous.shutdown()
        return "rank 7 failed"

    others = [each for number, each in enumerate(agents) if number != failed]
    if failed:
        others.append(agent(meetings, 3, tmp_path))
    assert {*together(fail, *(partial(meet, each) for each in others))} == {"rank 7 failed"}
    assert meetings.said == [], "none goes on"


def test_ranks_that_save_for_a_change_get_no_second_signal(
    meetings: Meetings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would end them before they have saved."""
    sent = list[tuple[str, int]]()
    ranks = SimpleNamespace(
        send=lambda number: sent.append(("send", number)), close=lambda number: sent.append(("close", number))
    )
    monkeypatch.setattr(Agent, "_ranks", ranks)
    each = agent(meetings, 0, tmp_path)
    each._change = Change("machine-b leaves", is_joining=False)
    each._serve_change()
    each.signals.append(signal.SIGTERM)
    assert not each._serve_signals()
    assert sent == [("send", signal.SIGTERM)]
    each.signals.append(signal.SIGTERM)
    assert each._serve_signals(), "the user's second one"
    assert sent[1:] == [("close", signal.SIGKILL)]


@pytest.mark.parametrize(
    ("error", "leaves_alone", "exit_code"),
    [
        ("OSError: the disk is full", True, 143),
        ("OSError: the disk is full", False, None),
        ("trainer_kit.errors.LostProcessError: a connection to another process broke", False, 143),
    ],
)
def test_a_machine_that_was_told_to_leave_starts_no_ranks_again(
    error: str, leaves_alone: bool, exit_code: int | None, meetings: Meetings, tmp_path: Path
) -> None:
    """Its last rank has failed meanwhile; the other machines go on if they are enough, or hear of the failure."""
    each = agent(meetings, 0, tmp_path)
    each._limit = each._failures.limit = RestartLimit(5)
    each._passed_on, each._leaves_alone = signal.SIGTERM, leaves_alone
    result = each._end_after(Failure(0, 1, 0.0, error, f"Traceback (most recent call last):\n{error}"))
    assert (result.state, each._remaining_restarts) == (WorkerState.FAILED, 0)
    assert each.exit_code == exit_code
    assert each.failed is not None
    assert [each.failed.message in line for line in meetings.said] == [True] * (exit_code == 143)


def test_a_machine_that_was_told_to_leave_does_not_restart_with_the_others(meetings: Meetings, tmp_path: Path) -> None:
    each = agent(meetings, 0, tmp_path)
    each._passed_on = signal.SIGTERM
    each._follow(News(ProcessFailed("rank 1 failed", 1, 3), goes_on=True))
    assert (each.exit_code, each._remaining_restarts, meetings.said) == (143, 0, [])


def test_a_machine_that_was_told_to_leave_hears_of_a_failure_of_another_one(
    meetings: Meetings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own ranks have failed since they missed the one that failed first."""
    each = agent(meetings, 0, tmp_path)
    each._passed_on = signal.SIGTERM
    news = News(ProcessFailed("rank 1 failed", 1, 3), goes_on=False)
    monkeypatch.setattr(each._machines, "news", lambda at_once: news)
    error = "trainer_kit.errors.LostProcessError: a connection to another process broke"
    each._end_after(Failure(0, 1, 0.0, error, error))
    assert (each.exit_code, each.failed) == (None, news.failure)


def test_ranks_that_stay_in_their_processes_get_a_later_signal(
    meetings: Meetings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They were to save for a change, but met the others in their processes."""
    sent = list[int]()
    monkeypatch.setattr(Agent, "_ranks", SimpleNamespace(send=sent.append))
    agents = [agent(meetings, number, tmp_path) for number in range(3)]
    agents[0]._tell(signal.SIGTERM)
    for each in agents:
        monkeypatch.setattr(each, "_left", lambda: "run/1")
    together(*(partial(meet, each) for each in agents))
    agents[0].signals.append(signal.SIGTERM)
    agents[0]._serve_signals()
    assert sent == [signal.SIGTERM] * 2
