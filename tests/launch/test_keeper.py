"""The machine that serves the store decides who trains together, by signs of life and a clock of its own."""

from __future__ import annotations

import functools
import itertools
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist
from kit.clock import Clock

from trainer_kit.errors import ProcessFailed
from trainer_kit.launch import keeper
from trainer_kit.launch.keeper import Keeper
from trainer_kit.launch.membership import Membership, Readiness, Right
from trainer_kit.launch.news import BEGINS, CHANGE, FAILED, GONE, OPEN, OUTCOME, Change, News
from trainer_kit.launch.news import LOST as LOST_MACHINES
from trainer_kit.launch.published import (
    ENDED,
    HERE,
    MACHINES,
    MEMBERSHIP,
    End,
    Facts,
    Here,
    Published,
    beat_key,
    machine_key,
)


class Store(dist.HashStore):
    """A store in which something happens after several values were read."""

    after_read: Callable[[], object] | None = None

    def multi_get(self, keys: list[str]) -> list[bytes]:
        found = super().multi_get(keys)
        if self.after_read is not None:
            self.after_read()
            self.after_read = None
        return found


class Launchers:
    """Launchers that write to a store, and the keeper that reads it."""

    def __init__(self, least: int = 2, most: int = 3) -> None:
        self.store, self.clock = Store(), Clock()
        self.alive: set[int] = set()
        self.ended = deque[int]()
        ports, limits = itertools.count(4000), {"last_call": 3, "patience": 3}
        serve_ranks = functools.partial(next, ports)
        self.keeper = Keeper(
            self.store, least, most, **limits, serve_ranks=serve_ranks, clock=self.clock.monotonic, ended=self.ended
        )

    def come(self, *past: Membership, name: str = "", **fields: Any) -> int:
        number = self.store.add(MACHINES, 1) - 1
        self.wait(number, *past, name=name, **fields)
        self.alive.add(number)
        return number

    def wait(self, number: int, *past: Membership, name: str = "", **fields: Any) -> None:
        facts = Facts(f"id-{name or number}", f"host-{name or number}", past, **fields)
        self.store.set(machine_key(number), facts.to_json())
        self.store.add(beat_key(number), 1)

    def pass_time(self, seconds: float) -> None:
        end = self.clock.now + seconds
        while self.clock.now < end:
            self.clock.now += 0.5
            for number in self.alive:
                self.store.add(beat_key(number), 1)
            self.keeper.look()

    @property
    def published(self) -> Published:
        return Published.from_json(self.store.get(MEMBERSHIP))

    @property
    def membership(self) -> Membership:
        return self.published.membership

    @property
    def here(self) -> Here:
        return Here.from_json(self.store.get(HERE))

    def told(self, key: str) -> bytes | None:
        name = f"{self.membership.number}/{key}"
        return self.store.get(name) if self.store.check([name]) else None


@pytest.fixture
def launchers() -> Launchers:
    return Launchers()


def test_all_come(launchers: Launchers) -> None:
    launchers.come()
    launchers.pass_time(10)
    assert launchers.published == Published()
    assert launchers.here == Here(1)
    launchers.come()
    launchers.pass_time(2)
    assert launchers.membership.number == 0, "the last call"
    launchers.come()
    launchers.pass_time(0.5)
    published = launchers.published
    assert (published.membership.number, published.numbers) == (1, (0, 1, 2))
    assert published.membership.hosts == ("host-0", "host-1", "host-2")
    assert (published.bases, published.right, published.gone, published.joined) == ((), Right.MAJORITY, (), ())
    assert published.port == 4000


def test_the_last_call_ends(launchers: Launchers) -> None:
    launchers.come()
    launchers.come()
    launchers.pass_time(4)
    assert launchers.published.numbers == (0, 1)


def test_a_silent_machine_is_left_out_and_joins_later(launchers: Launchers) -> None:
    for _ in range(3):
        launchers.come()
    launchers.pass_time(1)
    first = launchers.membership
    launchers.alive.remove(1)
    launchers.pass_time(1)
    for number in (0, 2):
        launchers.wait(number, first)
    launchers.pass_time(1)
    assert launchers.membership == first, "it may only be slow"
    launchers.pass_time(3)
    second = launchers.membership
    assert (second.number, launchers.published.numbers) == (2, (0, 2))
    assert (launchers.published.gone, launchers.published.bases) == (("host-1",), (first,))
    assert launchers.published.port == 4001, "the first store holds the addresses of the processes before"
    assert launchers.keeper.alive() == 2
    launchers.alive.add(1)
    launchers.wait(1, first)
    launchers.pass_time(1)
    change = Change.from_json(launchers.told(CHANGE) or b"")
    assert change == Change("host-1 joins: the run saves and continues with it", is_joining=True)
    for number in (0, 2):
        launchers.wait(number, second)
    launchers.pass_time(1)
    assert (launchers.membership.number, launchers.published.numbers) == (3, (0, 2, 1))
    assert launchers.published.joined == ("host-1",)
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
    assert (news.goes_on, news.is_loss) == (True, True)


def test_machines_that_are_lost_are_known_at_once_but_not_those_that_have_left(launchers: Launchers) -> None:
    for _ in range(3):
        launchers.come()
    launchers.pass_time(1)
    assert launchers.told(LOST_MACHINES) is None
    launchers.ended.append(2)  # its connection has closed
    launchers.alive.remove(2)
    launchers.keeper.look()
    assert launchers.told(LOST_MACHINES) == b"host-2"
    launchers.wait(2)  # only the connection was lost
    launchers.keeper.look()
    assert launchers.told(LOST_MACHINES) == b""
    launchers.wait(1, end=End.OVER)
    launchers.keeper.look()
    assert launchers.told(LOST_MACHINES) == b""
    launchers.pass_time(4)
    assert launchers.told(LOST_MACHINES) == b"host-2"


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
    assert launchers.published.numbers == (0, 1, 2)
    assert launchers.told(CHANGE) is None


@pytest.fixture
def pair(launchers: Launchers) -> Launchers:
    """A run on two machines of three."""
    for _ in range(2):
        launchers.come()
    launchers.pass_time(4)
    assert launchers.published.numbers == (0, 1)
    return launchers


PREPARING, READY = {"readiness": Readiness.PREPARING}, {"readiness": Readiness.READY}


def test_a_machine_that_prepares_is_left_alone(pair: Launchers) -> None:
    first = pair.membership
    pair.come(**PREPARING)
    pair.pass_time(5)
    assert pair.told(CHANGE) is None
    assert pair.here == Here(0, (), 2)
    pair.come()
    pair.pass_time(1)
    change = Change.from_json(pair.told(CHANGE) or b"")
    assert change == Change("host-3 joins: the run saves and continues with it", is_joining=True)
    for number in (0, 1):
        pair.wait(number, first)
    pair.pass_time(1)
    assert pair.published.numbers == (0, 1, 3), "the one that came first still prepares"


def test_a_machine_that_is_ready_joins_in_the_process_once_the_run_is_open(pair: Launchers) -> None:
    first, number = pair.membership, pair.come(**READY)
    for text in (None, ""):
        if text is not None:
            pair.store.set(f"1/{OPEN}", text)
        pair.pass_time(5)
        assert pair.told(CHANGE) is None
    pair.store.set(f"1/{OPEN}", "digest")
    pair.pass_time(1)
    change = Change.from_json(pair.told(CHANGE) or b"")
    assert change == Change("host-2 joins: the run continues with it", is_joining=True, in_process=True)
    assert pair.membership == first
    for other in (0, 1):
        pair.wait(other, first)
    pair.pass_time(1)
    assert pair.published.numbers == (0, 1, number)


def test_the_ranks_end_where_not_all_that_come_are_ready() -> None:
    launchers = Launchers(most=4)
    for _ in range(2):
        launchers.come()
    launchers.pass_time(4)
    launchers.store.set(f"1/{OPEN}", "digest")
    launchers.come(**READY)
    launchers.come()
    launchers.pass_time(1)
    change = Change.from_json(launchers.told(CHANGE) or b"")
    assert change == Change("host-2, host-3 join: the run saves and continues with them", is_joining=True)


def test_a_machine_that_prepares_is_taken_where_the_others_are_too_few(pair: Launchers) -> None:
    first, number = pair.membership, pair.come(**PREPARING)
    pair.alive.remove(1)
    pair.pass_time(4)
    change = Change.from_json(pair.told(CHANGE) or b"")
    assert change == Change("host-2 joins: the run saves and continues with it", is_joining=True)
    pair.wait(0, first)
    pair.pass_time(1)
    assert pair.published.numbers == (0, number)


def test_a_machine_that_has_not_started_leaves_ranks_in_their_processes() -> None:
    """It joins in the membership that follows, whose ranks save before they end."""
    launchers = Launchers(most=4)
    for _ in range(2):
        launchers.come()
    launchers.pass_time(4)
    first, ready, number = launchers.membership, launchers.come(**READY), launchers.come(**READY)
    launchers.store.set(f"1/{OPEN}", "digest")
    launchers.pass_time(1)
    assert Change.from_json(launchers.told(CHANGE) or b"").in_process
    launchers.wait(number)  # its ranks cannot join after all
    for other in (0, 1):
        launchers.wait(other, first, stays=True)
    launchers.pass_time(1)
    assert launchers.published.numbers == (0, 1, ready)
    change = Change.from_json(launchers.told(CHANGE) or b"")
    assert change == Change("host-3 joins: the run saves and continues with it", is_joining=True)
    for other in (0, 1, ready):
        launchers.wait(other, launchers.membership)
    launchers.pass_time(1)
    assert launchers.published.numbers == (0, 1, ready, number)


def test_the_run_ends_when_its_machines_have_left(launchers: Launchers) -> None:
    for _ in range(4):
        launchers.come()
    launchers.pass_time(1)
    for number in range(3):
        launchers.wait(number, launchers.membership, end=End.OVER)
        assert not launchers.store.check([ENDED])
    launchers.pass_time(1)
    assert launchers.store.check([ENDED])
    assert launchers.membership.number == 1, "the spare does not begin alone"


def test_a_launcher_that_has_ended_is_not_waited_for(launchers: Launchers) -> None:
    first, second, third = (launchers.come() for _ in range(3))
    launchers.pass_time(1)
    formed = launchers.membership
    launchers.alive.remove(third)
    launchers.ended.append(third)
    launchers.wait(first, formed)
    launchers.wait(second, formed)
    launchers.pass_time(1)
    assert launchers.published.numbers == (first, second)


def test_the_last_sign_of_life_before_the_end_is_none_after_it(launchers: Launchers) -> None:
    """It comes after the others were read, and the keeper hears of the end before it reads again."""
    first, second, third = (launchers.come() for _ in range(3))
    launchers.pass_time(1)
    formed = launchers.membership
    launchers.alive.remove(third)
    launchers.store.after_read = lambda: (launchers.store.add(beat_key(third), 1), launchers.ended.append(third))
    launchers.pass_time(0.5)
    assert launchers.told(LOST_MACHINES) == b"host-2"
    launchers.wait(first, formed)
    launchers.wait(second, formed)
    launchers.pass_time(0.5)
    assert launchers.published.numbers == (first, second), "at once"


def test_a_launcher_that_gives_signs_of_life_has_not_ended(launchers: Launchers) -> None:
    first, second, third = (launchers.come() for _ in range(3))
    launchers.pass_time(1)
    formed = launchers.membership
    launchers.ended.append(third)  # a firewall has cut its connection
    launchers.wait(first, formed)
    launchers.pass_time(2)
    launchers.wait(second, formed)
    launchers.pass_time(2)
    assert launchers.published.numbers == (first, second, third)
    launchers.wait(third, formed)
    launchers.pass_time(1)
    assert launchers.membership == formed._replace(number=2)
    assert launchers.published.numbers == (first, second, third)


LOST = Membership(4, ("id-a", "id-b", "id-c", "id-d"), "run", ("host-a", "host-b", "host-c", "host-d"))


def test_a_new_store_goes_on_with_the_run(launchers: Launchers) -> None:
    """Machines of the lost one come in any order, and a newcomer among them."""
    launchers.come(LOST, name="d")
    launchers.come()
    launchers.pass_time(5)
    assert launchers.membership.number == 0
    assert launchers.here == Here(2, ("host-d",), 4, has_first=False, may_follow=False)
    assert launchers.here.describe("host-d") == "this machine is 1 of 4"
    assert launchers.here.describe("host-of-newcomer") == "host-d is 1 of 4"
    assert launchers.here._replace(hosts=()).describe("host-d") == "none of 4 machines has come"
    for name in "cb":
        launchers.come(LOST, name=name)
    launchers.pass_time(1)
    assert launchers.membership == Membership(5, ("id-b", "id-c", "id-d"), "run", ("host-b", "host-c", "host-d"))
    assert (launchers.published.numbers, launchers.published.gone) == ((3, 2, 0), ("host-a",))


def test_a_new_store_does_not_wait_for_lost_machines_as_long_as_a_new_run() -> None:
    launchers = Launchers(most=4)
    launchers.keeper._last_call = 60
    for name in "cbd":
        launchers.come(LOST, name=name)
    launchers.pass_time(9)
    assert launchers.membership.number == 0
    launchers.pass_time(2)
    assert launchers.membership.number == 5


@pytest.mark.parametrize(
    ("names", "has_claimed", "right", "text"),
    [
        ("cd", False, None, "this machine and host-d are 2 of 4, without the first one"),
        ("ca", False, Right.FIRST_HALF, "this machine and host-a are 2 of 4"),
        ("cd", True, Right.OTHER_HALF, "this machine and host-d are 2 of 4, without the first one"),
    ],
)
def test_half_of_the_machines(
    launchers: Launchers, names: str, has_claimed: bool, right: Right | None, text: str
) -> None:
    for name in names:
        launchers.come(LOST, name=name, has_claimed=has_claimed)
    assert Here(2, tuple(f"host-{name}" for name in sorted(names)), 4, "a" in names).describe("host-c") == text
    launchers.pass_time(10)
    assert launchers.here.may_follow == (right is not None) or launchers.membership.number
    assert (launchers.published.right if launchers.membership.number else None) == right


def test_a_machine_that_connects_again_is_the_same_one(launchers: Launchers) -> None:
    for name in "abc":
        launchers.come(name=name)
    launchers.pass_time(1)
    first = launchers.membership
    launchers.alive.remove(1)
    for name in "bac":
        launchers.come(first, name=name)
    launchers.pass_time(1)
    assert launchers.membership == first._replace(number=2)
    assert (launchers.published.numbers, launchers.published.gone) == ((4, 3, 5), ())


@pytest.mark.parametrize("way", ["ended", "silent", "left"])
def test_a_membership_does_not_begin_without_one_of_its_machines(launchers: Launchers, way: str) -> None:
    for name in "abc":
        launchers.come(name=name)
    launchers.pass_time(1)
    assert launchers.told(OUTCOME) is None
    launchers.alive.remove(2)
    if way == "ended":
        launchers.ended.append(2)
    elif way == "left":
        launchers.wait(2, name="c", end=End.OVER)
    launchers.pass_time(4 if way == "silent" else 0.5)
    assert launchers.told(OUTCOME) == GONE.encode()


def test_a_membership_that_has_begun_stays_so(launchers: Launchers) -> None:
    for name in "abc":
        launchers.come(name=name)
    launchers.pass_time(1)
    launchers.store.compare_set(f"1/{OUTCOME}", "", BEGINS)
    launchers.ended.append(2)
    launchers.alive.remove(2)
    launchers.pass_time(1)
    assert launchers.told(OUTCOME) == BEGINS.encode()


@pytest.mark.parametrize("has_claimed", [True, False])
def test_a_half_without_the_first_machine_goes_on_where_it_can_claim_the_folder(has_claimed: bool) -> None:
    launchers = Launchers(least=1, most=2)
    for name in "ab":
        launchers.come(name=name, is_candidate=True)
    launchers.pass_time(1)
    assert launchers.keeper.can_go_on_without("id-a", has_claimed) == has_claimed
    assert launchers.keeper.can_go_on_without("id-b", has_claimed)


@pytest.mark.parametrize(
    ("ends", "expected"),
    [
        ((End.OVER, End.OVER), End.OVER),
        ((End.LEFT, End.OVER), End.OVER),
        ((End.FAILED, End.LEFT), End.LEFT),
        ((End.GIVEN_UP, End.FAILED), End.FAILED),
    ],
)
def test_the_run_has_ended_when_all_have_left(ends: tuple[End, End], expected: End) -> None:
    launchers = Launchers(least=1, most=2)
    for name in "ab":
        launchers.come(name=name)
    launchers.pass_time(1)
    for number, end in enumerate(ends):
        launchers.wait(number, launchers.membership, name="ab"[number], end=end)
        assert not launchers.store.check([ENDED])
        launchers.pass_time(0.5)
    assert launchers.store.get(ENDED).decode() == expected


def test_no_membership_follows_one_that_ended_with_a_failure(launchers: Launchers) -> None:
    """A machine that was lost from it in vain fails later, and ends nothing."""
    for name in "abc":
        launchers.come(name=name)
    launchers.pass_time(1)
    first = launchers.membership
    end = News(ProcessFailed("rank 2 failed", 2, 1), goes_on=False).to_json()
    launchers.store.compare_set(f"1/{FAILED}", "", end)
    launchers.alive.remove(2)
    for number, name in ((0, "a"), (1, "b")):
        launchers.wait(number, first, name=name)
    launchers.pass_time(4)
    assert launchers.membership == first


@pytest.mark.parametrize("is_hurried", [True, False])
def test_machines_have_time_to_hear_of_the_end(
    is_hurried: bool, launchers: Launchers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of a signal by which the machine with the store leaves, which hurries it."""
    monkeypatch.setattr(keeper, "_HEARD_SECONDS", 0.3)
    monkeypatch.setattr(keeper, "_PARTING_SECONDS", 1.0)
    launchers.come(name="a")
    begin = time.monotonic()
    launchers.keeper.stop(lambda: is_hurried, End.LEFT)
    seconds = time.monotonic() - begin
    assert launchers.store.get(ENDED).decode() == End.LEFT
    assert 0.3 < seconds < 0.8 if is_hurried else seconds >= 1.0


def test_a_keeper_gives_up_or_hands_over(launchers: Launchers) -> None:
    for name, is_candidate in (("a", True), ("b", False), ("c", True)):
        launchers.come(name=name, is_candidate=is_candidate)
    launchers.pass_time(1)
    first = launchers.membership
    assert launchers.keeper.can_go_on_without("id-a", has_claimed=False)
    launchers.wait(2, first, name="c", end=End.OVER)
    launchers.pass_time(0.5)
    assert not launchers.keeper.can_go_on_without("id-a", has_claimed=True), "only b stays, which is no candidate"
    launchers.wait(0, first, name="a", end=End.OVER)
    launchers.wait(1, first, name="b")
    launchers.keeper.hand_over("id-a", lambda: False, End.LEFT)
    assert not launchers.store.check([ENDED])
    launchers.wait(1, first, name="b", end=End.OVER)
    launchers.keeper.stop(lambda: False, End.GIVEN_UP)
    assert launchers.store.get(ENDED).decode() == End.GIVEN_UP
