"""The memberships of invented runs."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from trainer_kit.profiling.memberships import Members, MembershipEntry, MembershipHistory


def members(number: int, *hosts: str, launch: str = "launch") -> Members:
    return Members(len(hosts), 8 * len(hosts), launch, number, tuple(sorted(hosts)))


def test_the_beginning_is_no_change() -> None:
    history = MembershipHistory()
    history.record(members(1, "a", "b"))
    assert (history.latest, history.has_changed, history.part) == (None, False, 1.0)
    history.record(members(2, "a", "b"))
    assert (history.latest, history.has_changed) == (None, False)


def test_who_is_lost_and_who_comes_is_found() -> None:
    history = MembershipHistory()
    history.record(members(1, "a", "b", "c"))
    history.record(members(2, "a", "c"), cause="rank 8 was lost", pause=0.5, again=1, in_process=True)
    assert history.latest == MembershipEntry(2, 2, 16, 24, 3, ("b",), (), "rank 8 was lost", 0.5, 1, True)
    assert history.part == 2 / 3
    history.record(members(4, "a", "c", "d"), pause=20.0)
    history.record(members(5, "b", "c", "d"), pause=20.0)
    assert history.latest is not None
    assert (history.latest.lost, history.latest.joined) == (("a",), ("b",))
    assert (history.lost, history.joined, history.returned, history.pause, history.part) == (2, 2, 1, 40.5, 1.0)


def test_a_machine_that_is_lost_and_back_before_the_next_membership_is_found() -> None:
    history = MembershipHistory()
    history.record(members(1, "a", "b", "b")._replace(launchers=("1", "2", "3")))
    history.record(members(2, "a", "b", "b")._replace(launchers=("1", "2", "3")))
    assert history.latest is None, "it has continued with new processes"
    history.record(members(3, "a", "b", "b")._replace(launchers=("1", "3", "4")), pause=9.0)
    assert history.latest == MembershipEntry(3, 3, 24, 24, 3, ("b",), ("b",), pause=9.0)
    assert (history.lost, history.returned) == (1, 1)
    restored = MembershipHistory()
    restored.go_on(json.loads(json.dumps(history.state_dict())), 0, ())
    assert restored.members == history.members
    history.record(members(4, "a", "b", "b"))
    assert history.latest is None, "which launchers these are is not known"


def test_two_machines_may_have_one_name() -> None:
    history = MembershipHistory()
    history.record(members(1, "a", "a", "a"))
    history.record(members(2, "a"))
    assert history.latest is not None
    assert history.latest.lost == ("a", "a")


def test_a_resume_by_hand_under_another_number_loses_no_machine() -> None:
    history = MembershipHistory()
    history.record(Members(1, 4))
    history.record(Members(1, 2), pause=600.0)
    assert history.latest == MembershipEntry(2, 1, 2, 4, 1, pause=600.0)
    assert (history.lost, history.joined, history.part) == (0, 0, 1.0)


def test_another_launch_has_a_full_size_of_its_own() -> None:
    history = MembershipHistory()
    history.record(members(1, "a", "b", "c"))
    history.record(members(2, "a", "b"))
    history.record(members(1, "x", "y", launch="later"))
    assert (history.part, history.latest, history.lost) == (1.0, None, 1)


def test_what_was_logged_after_the_checkpoint_is_not_forgotten() -> None:
    history, later = MembershipHistory(), MembershipHistory()
    history.record(members(1, "a", "b", "c"))
    state = json.loads(json.dumps(history.state_dict()))
    history.record(members(2, "a", "b"), again=1, in_process=True)
    assert history.latest is not None
    later.go_on(state, steps=3, logged=[json.loads(json.dumps(history.latest.to_dict())) | {"event": "membership"}])
    assert (later.entries, later.steps_again, later.discarded) == (history.entries, 3 + 1, 3)
    later.record(members(3, "a", "b", "c"))
    assert later.latest is not None
    assert (later.latest.joined, later.returned, later.latest.number) == (("c",), 1, 3)


def test_a_checkpoint_of_an_earlier_version_has_no_history() -> None:
    history = MembershipHistory()
    history.go_on(None, steps=2, logged=[])
    history.record(members(4, "a", "b"))
    assert ([entry.number for entry in history.entries], history.steps_again) == ([4], 2)


HOSTS = st.lists(st.sampled_from("abcdef"), min_size=1, max_size=6, unique=True)


@given(st.lists(HOSTS, min_size=1, max_size=12), st.integers(0, 11))
def test_machines_that_are_there_have_come_and_not_gone(memberships: list[list[str]], restart: int) -> None:
    """Whatever follows, also over a checkpoint: those at first, less the lost and with the joined, are those now."""
    history = MembershipHistory()
    for number, hosts in enumerate(memberships, start=1):
        if number == restart:
            restored = MembershipHistory()
            restored.go_on(json.loads(json.dumps(history.state_dict())), 0, [])
            assert restored.entries == history.entries
            history = restored
        history.record(members(number, *hosts))
        assert len(memberships[0]) - history.lost + history.joined == len(hosts) == history.members.machines
        assert 0 < history.part <= 1
    numbers = [entry.number for entry in history.entries]
    assert numbers == sorted(set(numbers))
    assert history.returned <= min(history.lost, history.joined)
