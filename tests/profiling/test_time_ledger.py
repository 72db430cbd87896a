"""The ledger's arithmetic, with clocks made by hand."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainer_kit.profiling import time_ledger
from trainer_kit.profiling.memberships import Members
from trainer_kit.profiling.time_ledger import Ledger


class Clock:
    """A device that is behind the host: its marks pass when it comes to them."""

    def __init__(self) -> None:
        self.now = 0.0
        self.come_to = 0.0

    def mark(self) -> float:
        return self.now

    def passed(self, marks: Sequence[float]) -> list[float]:
        there = [mark for mark in marks if mark <= self.come_to]
        return [after - before for before, after in itertools.pairwise(there)]


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def book(clock: Clock) -> Ledger:
    book = Ledger()
    book._seconds.clear()
    book.keep_time_by(clock)
    book._seconds.clear()  # what passed on the host's clock
    return book


def test_an_activity_is_entered_and_left(book: Ledger, clock: Clock) -> None:
    for activity, seconds in (("data", 1.0), ("forward", 2.0), ("data", 4.0)):
        before = book.enter(activity)
        assert before == "setup"
        clock.now += seconds
        book.enter(before)
        clock.now += 0.5
    clock.come_to = clock.now
    assert book.seconds() == {"setup": 1.5, "data": 5.0, "forward": 2.0}
    assert book.wall() == 8.5


def test_an_activity_within_another_is_counted_once(book: Ledger, clock: Clock) -> None:
    with book.during("saving"):
        clock.now += 1
        with contextlib.suppress(ValueError), book.during("callback/Mine"):
            clock.now += 2
            raise ValueError("broken")
        clock.now += 4
    clock.come_to = clock.now
    assert book.seconds() == {"setup": 0.0, "saving": 5.0, "callback/Mine": 2.0}


def test_a_device_that_is_behind_is_not_waited_for(book: Ledger, clock: Clock) -> None:
    book.enter("forward")
    clock.now = 3.0
    book.enter("backward")
    clock.now = 5.0
    clock.come_to = 3.0
    assert book.seconds() == {"setup": 0.0, "forward": 3.0}
    clock.come_to = 5.0
    assert book.seconds() == {"setup": 0.0, "forward": 3.0, "backward": 2.0}


def test_marks_do_not_pile_up(book: Ledger, clock: Clock) -> None:
    for _ in range(3 * time_ledger._UNFOLDED):
        book.enter("forward")
        clock.come_to = clock.now = clock.now + 1.0
    assert len(book._entries) <= time_ledger._UNFOLDED + 1
    assert book.seconds()["forward"] == 3 * time_ledger._UNFOLDED


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 9)), max_size=50), st.integers(0, 3))
def test_the_sum_is_the_time_that_passed(path: list[tuple[str, int]], behind: int) -> None:
    clock, book = Clock(), Ledger()
    book.keep_time_by(clock)
    book._seconds.clear()
    for activity, seconds in path:
        book.enter(activity)
        clock.now += seconds
        clock.come_to = max(clock.come_to, clock.now - behind)
        if seconds == 3:
            book.seconds()
    clock.come_to = clock.now
    assert book.wall() == sum(seconds for _, seconds in path)


ACTIVITIES = ("forward", "backward", "optimizer", "data", "regroup")
PIECES = st.lists(
    st.tuples(
        st.integers(1, 8),  # processes of a membership
        st.lists(st.tuples(st.sampled_from(ACTIVITIES), st.integers(0, 20)), max_size=6),
        st.sampled_from(["in the process", "new processes", "rollback"]),
    ),
    min_size=1,
    max_size=12,
)


@given(PIECES, st.integers(0, 9), st.integers(0, 9))
def test_machines_that_are_missing_are_missing_from_the_goodput(
    pieces: list[tuple[int, list[tuple[str, int]], str]], lost: int, down: int
) -> None:
    """Against sums by hand, over memberships that follow in the process, from a checkpoint, and after a rollback."""
    clock, book, full = Clock(), Ledger(), 8
    book.keep_time_by(clock)
    book._seconds.clear()
    book.memberships.record(Members(1, full, "launch", 1))
    useful = total = missing = 0.0
    part = 1.0
    for number, (processes, path, change) in enumerate(pieces, start=2):
        members, saved = Members(1, processes, "launch", number), book.state_dict()
        kept = useful, total, missing
        if change == "new processes":
            clock, book = Clock(), Ledger()
            book.keep_time_by(clock)
            book._seconds.clear()
            book.started = saved["time"] + lost + down
            clock.now = clock.come_to = 7.0  # of setup
            book.go_on(saved, lost=lost)
            total, missing = total + lost + down + 7, missing + lost * (1 - part) + 7 * (1 - processes / full)
            book.memberships.record(members)
            book.resize(since_start=True)
        else:
            book.memberships.record(members, in_process=True)
            book.resize()
        part = processes / full
        for activity, seconds in path:
            book.enter(activity)
            clock.now = clock.come_to = clock.now + seconds
            useful += seconds * part * (activity in time_ledger.USEFUL)
            total, missing = total + seconds, missing + seconds * (1 - part)
            book.enter("loop")
        if change == "rollback":
            book.go_back(saved)
            useful = kept[0]  # the time has passed, and machines were missing in it
        assert book.wall() == pytest.approx(total, abs=1e-9)
        assert book.reduced() == pytest.approx(missing, abs=1e-9)
        assert book.goodput() * max(total, 1e-9) == pytest.approx(useful, abs=1e-9)
        assert -1e-12 <= book.goodput() <= 1 + 1e-12
        assert book.reduced() <= book.wall() + 1e-9


def test_a_run_whose_machines_stay_has_the_share_of_its_steps(book: Ledger, clock: Clock) -> None:
    book.enter("forward")
    clock.come_to = clock.now = 3.0
    book.enter("saving")
    clock.come_to = clock.now = 4.0
    assert (book.goodput(), book.reduced(), book.missing()) == (0.75, 0.0, {})


def test_a_restart_finds_lost_work_and_the_time_it_was_down(book: Ledger, clock: Clock) -> None:
    book.started = 1000.0
    clock.come_to = clock.now = 5.0  # seconds of this start's setup
    book.go_on({"seconds": {"forward": 30.0, "lost": 1.0}, "time": 900.0}, lost=20.0)
    assert book.seconds() == {"forward": 30.0, "setup": 5.0, "lost": 21.0, "down": 80.0}


def test_no_more_is_lost_than_passed(book: Ledger) -> None:
    book.started = 1000.0
    book.go_on({"seconds": {}, "time": 900.0}, lost=110.0)
    assert book.seconds() == {"setup": 0.0, "lost": 100.0, "down": 0.0}


def test_a_clock_that_was_set_back_takes_nothing_away(book: Ledger) -> None:
    book.started = 500.0
    book.go_on({"seconds": {"forward": 3.0}, "time": 900.0}, lost=10.0)
    assert book.wall() == 3.0


def test_what_is_done_again_is_lost_though_the_device_is_behind(book: Ledger, clock: Clock) -> None:
    book.enter("forward")
    clock.now = 3.0
    place = book.place()
    clock.now = 5.0
    book.enter("backward")
    clock.now = 9.0
    book.lose(place)
    book.enter("forward")
    clock.now = clock.come_to = 10.0
    assert book.seconds() == {"setup": 0.0, "forward": 3.0 + 1.0, "lost": 2.0 + 4.0}


def test_a_wait_is_counted_as_another_activity(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one within an activity that the error has ended."""
    now = [100.0]
    monkeypatch.setattr(time_ledger.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(time_ledger.HostClock, "mark", staticmethod(time_ledger.time.perf_counter))
    book = Ledger()
    now[0] += 5
    with contextlib.suppress(ConnectionError), book.during("evaluation"):
        now[0] += 20
        raise ConnectionError
    now[0] += 1
    book.enter_since(13.0, "regroup")
    now[0] += 2
    book.enter("loop")
    assert book.seconds() == pytest.approx({"setup": 5.0, "evaluation": 8.0, "regroup": 15.0, "loop": 0.0})
    book.enter_since(1000.0, "regroup")
    assert book.seconds() == pytest.approx({"setup": 5.0, "evaluation": 8.0, "regroup": 15.0, "loop": 0.0})


def test_a_wait_is_counted_as_it_was_by_a_device_with_a_clock_of_its_own(book: Ledger, clock: Clock) -> None:
    clock.now = clock.come_to = 5.0
    book.enter_since(3.0, "regroup")
    clock.now = clock.come_to = 6.0
    assert book.seconds() == {"setup": 5.0, "regroup": 1.0}


def test_what_is_done_again_is_lost_after_many_activities(book: Ledger, clock: Clock) -> None:
    """Places hold while activities before and after them are folded into totals."""
    for now in range(10_000):
        clock.now = clock.come_to = float(now)
        book.enter("forward" if now % 2 else "data")
        if now == 9_990:
            place = book.place()
    book.seconds()  # folds what comes before the place, and some of what comes after it
    clock.now = 10_004.0
    book.enter("forward")
    book.lose(place)
    clock.come_to = clock.now = 10_005.0
    assert book.seconds() == {"setup": 0.0, "data": 5000.0, "forward": 4999.0 + 0.0, "lost": 6.0}


def test_a_rollback_counts_all_since_the_checkpoint_as_lost(book: Ledger, clock: Clock) -> None:
    book._seconds.update({"forward": 10.0, "down": 7.0, "lost": 2.0})
    state = {"seconds": {"forward": 4.0, "lost": 1.0}, "time": 0.0}
    clock.come_to = clock.now = 3.0
    book.go_back(state)
    assert book.seconds() == {"setup": 0.0, "forward": 4.0, "lost": 1.0 + 6.0 + 1.0 + 3.0, "down": 7.0}
    assert book.wall() == 10.0 + 7.0 + 2.0 + 3.0


def test_activities_are_ranges_of_a_trace_while_that_is_asked_for(book: Ledger) -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as recorded:
        book.enter("long before")
        book.enter("before")
        book.show_ranges()
        book.enter("forward")
        book.enter("backward")
        book.hide_ranges()
        book.enter("after")
        book.enter("long after")
    names = {event.name for event in recorded.events()}
    assert {"before", "forward", "backward"} <= names
    assert not {"long before", "after", "long after"} & names
