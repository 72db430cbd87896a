"""The machine that serves the store decides who trains together, by signs of life and a clock of its own."""

from __future__ import annotations

import json
from collections import deque

import pytest
import torch.distributed as dist
from kit.clock import Clock

from trainer_kit.launch.keeper import ENDED, HERE, MACHINES, MEMBERSHIP, Keeper, Published, beat_key, machine_key
from trainer_kit.launch.news import CHANGE, FAILED, Change, News


class Launchers:
    """Launchers that write to a store, and the keeper that reads it."""

    def __init__(self, least: int = 2, most: int = 3) -> None:
        self.store, self.clock = dist.HashStore(), Clock()
        self.alive: set[int] = set()
        self.ended = deque[int]()
        limits = {"last_call": 3, "patience": 3}
        self.keeper = Keeper(self.store, least, most, **limits, clock=self.clock.monotonic, ended=self.ended)

    def come(self, after: int = 0, place: int = -1) -> int:
        number = self.store.add(MACHINES, 1) - 1
        self.wait(number, after, place)
        self.alive.add(number)
        return number

    def wait(self, number: int, after: int, place: int, has_left: bool = False) -> None:
        facts = [f"host-{number}", after, place, "run" if after else "", has_left]
        self.store.set(machine_key(number), json.dumps(facts))
        self.store.add(beat_key(number), 1)

    def pass_time(self, seconds: float) -> None:
        end = self.clock.now + seconds
        while self.clock.now < end:
            self.clock.now += 0.5
            for number in self.alive:
                self.store.add(beat_key(number), 1)
            self.keeper.look()

    @property
    def membership(self) -> Published:
        return Published.from_json(self.store.get(MEMBERSHIP))

    def told(self, key: str) -> bytes | None:
        name = f"{self.membership.number}/{key}"
        return self.store.get(name) if self.store.check([name]) else None


@pytest.fixture
def launchers() -> Launchers:
    return Launchers()


def test_all_come(launchers: Launchers) -> None:
    launchers.come()
    launchers.pass_time(10)
    assert launchers.membership == Published()
    assert launchers.store.get(HERE) == b"1"
    launchers.come()
    launchers.pass_time(2)
    assert launchers.membership.number == 0, "the last call"
    launchers.come()
    launchers.pass_time(0.5)
    assert launchers.membership[:2] == (1, (0, 1, 2))
    assert launchers.membership.hosts == ("host-0", "host-1", "host-2")
    assert (launchers.membership.gone, launchers.membership.joined) == ((), ())


def test_the_last_call_ends(launchers: Launchers) -> None:
    launchers.come()
    launchers.come()
    launchers.pass_time(4)
    assert launchers.membership.machines == (0, 1)


def test_a_silent_machine_is_left_out_and_joins_later(launchers: Launchers) -> None:
    for _ in range(3):
        launchers.come()
    launchers.pass_time(1)
    launchers.alive.remove(1)
    launchers.pass_time(1)
    for number in (0, 2):
        launchers.wait(number, after=1, place=number)
    launchers.pass_time(1)
    assert launchers.membership.number == 1, "it may only be slow"
    launchers.pass_time(3)
    assert launchers.membership[:2] == (2, (0, 2))
    assert launchers.membership.gone == ("host-1",)
    assert launchers.keeper.alive() == 2
    launchers.alive.add(1)
    launchers.wait(1, after=1, place=1)
    launchers.pass_time(1)
    change = Change.from_json(launchers.told(CHANGE) or b"")
    assert change == Change("host-1 joins: the run saves and goes on with it", is_joining=True)
    for place, number in enumerate((0, 2)):
        launchers.wait(number, after=2, place=place)
    launchers.pass_time(1)
    assert launchers.membership[:2] == (3, (0, 2, 1))
    assert launchers.membership.joined == ("host-1",)
    assert launchers.told(CHANGE) is None


def test_a_lost_machine_is_announced_where_the_ranks_do_not_notice(launchers: Launchers) -> None:
    for _ in range(3):
        launchers.come()
    launchers.pass_time(1)
    launchers.alive.remove(2)
    launchers.pass_time(24)
    assert launchers.told(FAILED) is None
    launchers.pass_time(2)
    news = News.from_json(launchers.told(FAILED) or b"")
    assert news.failure.message in ("host-2 has not answered for 25 s", "host-2 has not answered for 26 s")
    assert news.goes_on is None


def test_a_pause_of_the_keeper_is_no_silence_of_the_others(launchers: Launchers) -> None:
    for _ in range(3):
        launchers.come()
    launchers.pass_time(1)
    launchers.clock.now += 60
    launchers.keeper.look()
    assert launchers.keeper.alive() == 3
    assert launchers.told(FAILED) is None


def test_a_spare_waits(launchers: Launchers) -> None:
    for _ in range(4):
        launchers.come()
    launchers.pass_time(5)
    assert launchers.membership.machines == (0, 1, 2)
    assert launchers.told(CHANGE) is None


def test_the_run_ends_when_its_machines_have_left(launchers: Launchers) -> None:
    for _ in range(4):
        launchers.come()
    launchers.pass_time(1)
    for number in range(3):
        launchers.wait(number, 1, number, has_left=True)
        assert not launchers.store.check([ENDED])
    launchers.pass_time(1)
    assert launchers.store.check([ENDED])
    assert launchers.membership.number == 1, "the spare does not begin alone"


def test_a_launcher_that_has_ended_is_not_waited_for(launchers: Launchers) -> None:
    first, second, third = (launchers.come() for _ in range(3))
    launchers.pass_time(1)
    launchers.alive.remove(third)
    launchers.ended.append(third)
    launchers.wait(first, 1, 0)
    launchers.wait(second, 1, 1)
    launchers.pass_time(1)
    assert launchers.membership.machines == (first, second)


def test_a_launcher_that_gives_signs_of_life_has_not_ended(launchers: Launchers) -> None:
    first, second, third = (launchers.come() for _ in range(3))
    launchers.pass_time(1)
    launchers.ended.append(third)  # a firewall has cut its connection
    launchers.wait(first, 1, 0)
    launchers.pass_time(2)
    launchers.wait(second, 1, 1)
    launchers.pass_time(2)
    assert launchers.membership.machines == (first, second, third)
    launchers.wait(third, 1, 2)
    launchers.pass_time(1)
    assert launchers.membership == Published(2, (first, second, third), "run", launchers.membership.hosts)
