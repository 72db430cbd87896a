"""What follows from the beats of others, with time told by the tests."""

from __future__ import annotations

import json
import os

import pytest
from kit.clock import Clock

from trainer_kit.strategies.watchdog import peers
from trainer_kit.strategies.watchdog.peers import Beat, PeerTable

PATIENCE = 30.0
CALM = Beat(
    1, "north", 1, 7, "backward, called in _pass (trainer_kit/loop/train_step.py:2)", True, 0.0, False, "", False, False
)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(peers, "time", clock)
    return clock


def raw(beat: Beat) -> bytes:
    return json.dumps(beat).encode()


def kinds(roster: PeerTable) -> list[tuple[int, str]]:
    return [(problem.rank, problem.kind) for problem in roster.problems()]


def test_silence_makes_lost_once_patience_has_ended(clock: Clock) -> None:
    roster = PeerTable(0, PATIENCE)
    roster.take_in({1: raw(CALM), 2: raw(CALM)}, b"")
    clock.now += PATIENCE
    roster.take_in({1: raw(CALM), 2: raw(CALM._replace(number=2))}, b"")
    assert kinds(roster) == []
    assert roster.silent() == [1]
    clock.now += 1
    roster.take_in({1: raw(CALM), 2: raw(CALM._replace(number=2))}, b"")
    assert [problem.text for problem in roster.problems()] == ["rank 1 (north, process 7) has not answered for 31 s"]
    roster.take_in({1: raw(CALM._replace(vouched=1))}, b"")
    assert kinds(roster) == []


def test_silence_is_measured_while_the_store_answers(clock: Clock) -> None:
    roster = PeerTable(0, PATIENCE)
    roster.take_in({1: raw(CALM)}, b"")
    clock.now += 10 * PATIENCE
    assert kinds(roster) == []


def test_forgiveness_starts_anew(clock: Clock) -> None:
    roster = PeerTable(0, PATIENCE)
    roster.take_in({1: raw(CALM)}, b"")
    clock.now += 10 * PATIENCE
    roster.grace_until = clock.now
    roster.take_in({1: raw(CALM)}, b"")
    assert kinds(roster) == []
    clock.now += PATIENCE + 1
    roster.take_in({1: raw(CALM)}, b"")
    assert kinds(roster) == [(1, "lost")]


def test_who_has_not_begun_is_not_missed(clock: Clock) -> None:
    roster = PeerTable(0, PATIENCE)
    roster.take_in({1: b""}, b"")
    clock.now += 10 * PATIENCE
    roster.take_in({1: b""}, b"")
    assert kinds(roster) == []
    assert roster.standing(1.0) == ({}, [])


def test_others_hear_of_it_from_the_board(clock: Clock) -> None:
    first, third = PeerTable(0, PATIENCE), PeerTable(2, PATIENCE)
    failed = CALM._replace(error="ValueError: bad")
    first.take_in({1: raw(failed), 2: raw(CALM._replace(left=True)), 3: raw(CALM)}, b"")
    clock.now += PATIENCE
    first.take_in({}, b"")
    third.take_in({0: raw(CALM)}, first.board().encode())
    assert kinds(third) == [(1, "failed")]
    assert third.silent() == [3]
    assert third.problems()[0].text == "rank 1 (north, process 7) failed: ValueError: bad"


def test_one_that_left_since_it_missed_another_is_no_cause(clock: Clock) -> None:
    roster = PeerTable(0, PATIENCE)
    roster.take_in({1: raw(CALM._replace(left=True, follows=True)), 2: raw(CALM._replace(left=True))}, b"")
    assert kinds(roster) == [(1, "follows"), (2, "left")]
    text = "rank 1 (north, process 7) has left the run, in which it missed another process"
    assert roster.problems()[0].text == text
    assert roster.is_missing(1)


def test_the_worst_come_first_and_what_follows_is_no_root_cause(clock: Clock) -> None:
    roster = PeerTable(0, PATIENCE)
    beats = {
        1: CALM._replace(left=True),
        2: CALM._replace(error="rank 3 failed", follows=True),
        3: CALM._replace(error="ValueError: bad"),
    }
    roster.take_in({rank: raw(beat) for rank, beat in beats.items()}, b"")
    assert kinds(roster) == [(3, "failed"), (2, "follows"), (1, "left")]
    assert [problem.rank for problem in roster.root_causes()] == [3]


def test_the_system_knows_of_processes_of_this_machine(clock: Clock) -> None:
    host, namespace = peers.machine()
    here = CALM._replace(host=host, namespace=namespace)
    gone = here._replace(pid=2**22 + 1)  # above what Linux gives out
    roster = PeerTable(0, PATIENCE)
    roster.take_in({1: raw(here._replace(pid=os.getpid())), 2: raw(gone), 3: raw(gone._replace(namespace=-1))}, b"")
    assert [(problem.rank, problem.kind) for problem in roster.root_causes()] == [(2, "gone")]
    assert not roster.all_have_heard()
    roster.take_in({1: raw(CALM._replace(heard=True)), 3: raw(CALM._replace(heard=True))}, b"")
    assert roster.all_have_heard()


def test_who_stands_and_who_waits(clock: Clock) -> None:
    roster = PeerTable(0, PATIENCE)
    busy = CALM._replace(waits=False, idle=70.0, place="load (project/data.py:2)")
    roster.take_in({0: raw(CALM._replace(idle=65.0)), 1: raw(busy), 2: raw(busy._replace(idle=3.0))}, b"")
    assert roster.standing(60.0) == ({0: 65.0, 1: 70.0}, [0])
    assert roster.account(1) == "rank 1 (north, process 7) has been for 1 min 10 s in load (project/data.py:2)"
    assert [problem.rank for problem in roster.suspects(10.0)] == [1, 2]


def test_one_that_others_vouch_for_is_slow(clock: Clock) -> None:
    roster = PeerTable(0, PATIENCE)
    for _ in range(7):
        roster.take_in({0: raw(CALM._replace(number=int(clock.now), idle=65.0)), 1: raw(CALM)}, b"")
        clock.now += 10
    vouched = CALM._replace(vouched=3)
    roster.take_in({0: raw(CALM._replace(number=int(clock.now), idle=65.0)), 1: raw(vouched)}, b"")
    assert roster.standing(60.0) == ({0: 65.0, 1: 70.0}, [0])
    assert roster.account(1).endswith("; it runs, but does not answer")


def test_nobody_to_blame_names_all(clock: Clock) -> None:
    roster = PeerTable(1, PATIENCE)
    roster.take_in({0: raw(CALM), 1: raw(CALM), 2: raw(CALM)}, b"")
    assert [problem.rank for problem in roster.suspects(10.0)] == [0, 2]
    clock.now += 10
    roster.take_in({0: raw(CALM._replace(number=2))}, b"")
    assert [(problem.rank, problem.kind) for problem in roster.suspects(10.0)] == [(2, "lost")]


@pytest.mark.parametrize(
    ("beat", "missing"),
    [
        (CALM, False),
        (CALM._replace(left=True), True),
        (CALM._replace(error="ValueError: boom"), True),
        (CALM._replace(host=peers.machine()[0], namespace=peers.machine()[1], pid=os.getpid()), False),
        (CALM._replace(host=peers.machine()[0], namespace=peers.machine()[1], pid=2**22 + 1), True),
    ],
)
def test_a_process_that_left_or_failed_or_ended_is_missing(clock: Clock, beat: Beat, missing: bool) -> None:
    roster = PeerTable(0, PATIENCE)
    assert not roster.is_missing(1)  # before its first beat
    roster.take_in({1: raw(beat)}, b"")
    assert roster.is_missing(1) == missing
    clock.now += PATIENCE + 1
    roster.take_in({1: raw(beat)}, b"")
    assert roster.is_missing(1)
