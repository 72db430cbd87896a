"""What launchers tell one another while their ranks train."""

from __future__ import annotations

import socket
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from kit.clock import Clock

from trainer_kit.errors import ProcessFailed
from trainer_kit.launch import machines
from trainer_kit.launch.config import LaunchConfig
from trainer_kit.launch.machines import Machines
from trainer_kit.launch.news import CHANGE, LOST, OPEN, Change, News


def channels(count: int = 2, is_lasting: bool = True, **fields: Any) -> list[Machines]:
    """The channels of several machines, all of which serve the store here, so that none looks for a port."""
    store = dist.HashStore()
    made = []
    for place in range(count):
        config = LaunchConfig(num_nodes=count, rdzv_conf={"is_host": True}, rdzv_backend="c10d", **fields)
        rendezvous: Any = SimpleNamespace(
            is_lasting=is_lasting,
            alive=lambda: 1,
            serves=True,
            answers=lambda: True,
            can_leave=lambda: True,
            expect_to_leave=lambda: None,
            store_number=1,
        )
        made.append(Machines(config, rendezvous))
        made[-1].join(store, place, count)
    return made


def test_the_first_failure_is_everybody_s() -> None:
    first, second = channels()
    assert second.news() is None
    own = first.announce(ProcessFailed("rank 0 failed", 0, 3), goes_on=True)
    assert (own.failure.rank, own.goes_on) == (0, True)
    other = second.announce(ProcessFailed("rank 1 failed", 1, 4), goes_on=False)
    assert (other.failure.rank, other.goes_on) == (0, True)
    news = second.news(at_once=True)
    assert news is not None
    assert news.failure.message == "rank 0 failed"
    assert news.host == socket.gethostname() == second.host


def test_a_loss_is_no_failure_of_any_machine() -> None:
    first, second = channels()
    assert first.lost() == ""
    first._reach().set(LOST, "machine-c")
    assert first.lost() == second.lost() == "machine-c"
    first.announce(ProcessFailed("rank 0 failed", 0, 3), goes_on=True, is_loss=True)
    news = second.news(at_once=True)
    assert news is not None
    assert news.is_loss
    second.rendezvous.answers = lambda: False  # type: ignore[method-assign]
    assert second.lost() == "the machine with the store, which does not answer"
    fixed, _ = channels(is_lasting=False)
    assert fixed.lost() == "", "a fixed number of machines cannot go on without one"


def test_one_looks_once_a_second() -> None:
    first, second = channels()
    assert second.news() is None
    first.announce(ProcessFailed("rank 0 failed", 0, 3), goes_on=True)
    assert second.news() is None
    assert second.news(at_once=True) is not None


def test_an_end_that_comes_while_machines_meet_again_is_not_missed() -> None:
    first, second = channels()
    missed = second.missed_end()
    assert missed() == ""
    first.announce(ProcessFailed("rank 0 failed", 0, 3), goes_on=False)
    second.leave()
    news = News.from_json(missed())
    assert (news.failure.rank, news.goes_on) == (0, False)
    second.rendezvous.store_number = 2
    assert missed() == "", "a lost store is not asked"
    assert second.missed_end()() == "", "it has not met before"


@pytest.mark.parametrize(("goes_on", "is_lasting"), [(True, True), (False, False)])
def test_what_ends_no_run_or_no_lasting_one_is_no_missed_end(goes_on: bool, is_lasting: bool) -> None:
    first, second = channels(is_lasting=is_lasting)
    missed = second.missed_end()
    first.announce(ProcessFailed("rank 0 failed", 0, 3), goes_on=goes_on)
    assert missed() == ""


def test_texts_are_gathered_by_place() -> None:
    first, second = channels()
    first._reach().set("trainer_kit/text-1", "second")
    assert first.gather("first") == second.gather("second") == ["first", "second"]


def test_a_lone_machine_asks_no_store() -> None:
    machines = Machines(LaunchConfig(), SimpleNamespace(is_lasting=False))  # type: ignore[arg-type]
    failure = ProcessFailed("rank 0 failed", 0, 3)
    assert machines.announce(failure, goes_on=False).failure is failure
    assert machines.news() is None
    assert machines.change() is None
    assert machines.host == "", "there is no other one to tell it from"


def test_a_change_is_announced_to_all() -> None:
    first, second = channels(3, min_nodes=2)[:2]
    assert first.change() is None
    change = Change("host-2 joins", is_joining=True)
    second._reach().set(CHANGE, change.to_json())
    assert first.change() == change
    assert first.is_time_for_change()
    assert not first.is_time_for_change()


@pytest.mark.parametrize(
    ("least", "can_leave", "is_announced"), [(2, True, True), (2, False, False), (None, True, False)]
)
def test_a_machine_leaves_alone_if_enough_stay(
    monkeypatch: pytest.MonkeyPatch, least: int | None, can_leave: bool, is_announced: bool
) -> None:
    first, *_ = channels(3, min_nodes=least)
    monkeypatch.setattr(first.rendezvous, "can_leave", lambda: can_leave)
    first.announce_leaving("machine-b")
    expected = Change("machine-b leaves: the run saves and continues without it", is_joining=False)
    assert first.change() == (expected if is_announced else None)


@pytest.mark.parametrize(
    ("least", "count", "can_leave", "waiting", "expected"),
    [
        (2, 3, True, 1, True),
        (2, 3, True, 0, False),
        (2, 2, True, 1, False),
        (2, 3, False, 1, False),
        (None, 3, True, 1, False),
    ],
)
def test_a_machine_is_replaced_if_enough_stay_and_one_waits(
    monkeypatch: pytest.MonkeyPatch, least: int | None, count: int, can_leave: bool, waiting: int, expected: bool
) -> None:
    first, *_ = channels(3, min_nodes=least)
    first.rendezvous.waiting = lambda: waiting  # type: ignore[method-assign]
    first.rendezvous.can_leave = lambda: can_leave  # type: ignore[method-assign]
    monkeypatch.setattr(first, "_count", count)
    assert first.can_be_replaced() == expected


def test_a_store_that_is_gone_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    (first,) = channels(2, min_nodes=1)[:1]

    class Gone:
        def __getattr__(self, name: str) -> Any:
            raise RuntimeError("connection reset")

    monkeypatch.setattr(first, "_store", Gone())
    failure = ProcessFailed("rank 0 failed", 0, 3)
    assert first.announce(failure, goes_on=True).failure is failure
    assert first.news(at_once=True) is None
    assert first.change() is None
    assert first.lost() == "the machine with the store, which does not answer"


def test_newcomers_read_which_training_is_open(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(machines.time, "monotonic", clock.monotonic)
    first, second = channels()
    store = second._reach()
    first.open_for(None)
    assert not store.check([OPEN]), "it may open later"
    first.open_for("")
    assert store.get(OPEN) == b"", "it never does"
    clock.now += 1.5
    first.open_for("digest")
    assert store.get(OPEN) == b"digest"
    first.open_for(None)
    assert store.get(OPEN) == b"digest", "once a second at most"
    clock.now += 1.5
    first.open_for(None)
    assert store.get(OPEN) == b""
    empty = dist.HashStore()
    first.open_for("digest")
    first.join(empty, 0, 2)
    first.open_for("digest")
    assert empty.get(OPEN) == b"digest", "each membership has keys of its own"


def test_a_machine_between_two_memberships_is_alone() -> None:
    first, second = channels(min_nodes=1)
    second._reach().set(CHANGE, Change("machine-c joins", is_joining=True).to_json())
    assert first.change() is not None
    first.leave()
    assert first.change() is None
    assert first.news(at_once=True) is None
    assert first.lost() == ""
    first.announce_leaving("machine-a")
    first.open_for("digest")
    assert not second._reach().check([OPEN])
    assert not first.can_be_replaced()
