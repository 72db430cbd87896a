"""Which machines form the next membership, and that there is never more than one."""

from __future__ import annotations

import random
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.memberships import Network

from trainer_kit.launch.membership import (
    Machine,
    Membership,
    Readiness,
    Right,
    bases_of,
    counted,
    newcomers,
    next_membership,
    right_to_follow,
    waiting,
)


def membership(number: int, machines: str) -> Membership:
    return Membership(number, tuple(machines), "run", tuple(f"host-{machine}" for machine in machines))


BEFORE, LAST = membership(2, "abc"), membership(3, "abc")


def running(machine: str) -> Machine:
    return Machine(ord(machine), machine, f"host-{machine}", (BEFORE,))


def returned(machine: str, *past: Membership, has_claimed: bool = False, stays: bool = False) -> Machine:
    return Machine(ord(machine), machine, f"host-{machine}", past or (LAST,), has_claimed, stays=stays)


def fresh(machine: str) -> Machine:
    return Machine(ord(machine), machine, f"host-{machine}")


def formed(last: Membership, *alive: Machine, least: int = 2, most: int = 3, over: bool = False) -> str:
    found = next_membership(last, alive, least, most, over)
    return "" if found is None else "".join(found.membership.machines)


def test_the_first_membership_waits_for_all_or_for_the_last_call() -> None:
    start = Membership()
    assert formed(start, fresh("a")) == formed(start, fresh("a"), over=True) == ""
    assert formed(start, fresh("a"), fresh("b")) == ""
    assert formed(start, fresh("a"), fresh("b"), over=True) == "ab"
    assert formed(start, fresh("c"), fresh("a"), fresh("b")) == "abc"
    assert formed(start, *map(fresh, "abcd")) == "abc"


def test_those_that_stay_go_on_at_once_when_all_that_live_have_come() -> None:
    assert formed(LAST, returned("a"), running("b"), running("c")) == ""
    assert formed(LAST, returned("a"), returned("c"), running("b")) == ""
    assert formed(LAST, returned("c"), returned("a")) == "ac"
    assert formed(LAST, returned("c"), returned("a"), least=3) == ""


def test_a_machine_that_connects_again_has_returned() -> None:
    """It has missed the membership that was published meanwhile."""
    again = returned("b", BEFORE)._replace(is_new=True)
    assert formed(LAST, returned("a"), returned("b", BEFORE)) == ""
    assert formed(LAST, returned("a"), again) == "ab"


def test_newcomers_do_not_go_on_with_a_run_alone() -> None:
    assert formed(LAST, *map(fresh, "defg")) == ""


def test_newcomers_take_the_places_after_those_that_stay() -> None:
    assert formed(LAST, fresh("d"), returned("c"), fresh("e"), returned("b")) == "bcd"
    assert formed(LAST, *map(returned, "abc"), fresh("d")) == "abc"


def test_machines_of_a_lost_store_keep_their_order() -> None:
    """The new store numbers them by their arrival."""
    last, start = membership(5, "dcba"), Membership()
    come = [
        fresh("e"), Machine(0, "a", "host-a", (last,)), Machine(1, "c", "host-c", (last,)),
        Machine(2, "b", "host-b", (last,)),
    ]  # fmt: skip
    found = next_membership(start, come, 2, 4, False)
    assert found is not None
    assert found.membership == membership(6, "cbae")
    assert found.bases == (last,)
    assert next_membership(start, come[:3], 2, 4, False) is None, "two of four, without the first one"
    assert formed(start, *come[1:], most=5) == "", "others may come"
    assert formed(start, *come[1:], most=5, over=True) == "cba"
    assert formed(start, *come, returned("d", last), most=6) == "dcbae", "all have come"


def test_a_part_with_the_only_store_needs_no_majority() -> None:
    for alive in ([returned("c")], [returned("b"), fresh("d")]):
        assert next_membership(LAST, alive, 1, 3, False) is None
        found = next_membership(LAST, alive, 1, 3, False, is_only_store=True)
        assert found is not None
        assert (found.right, found.bases) == (Right.MAJORITY, (LAST,))


def test_each_run_has_its_own_id() -> None:
    first, second = (next_membership(Membership(), [fresh("a")], 1, 1, False) for _ in range(2))
    assert first is not None
    assert second is not None
    assert first.membership.run != second.membership.run


def test_newcomers_are_those_for_which_there_is_room() -> None:
    here = [running("a"), running("b")]
    assert newcomers(LAST, [*here, running("c"), fresh("d")], 3) == []
    assert newcomers(LAST, [*here, fresh("d"), fresh("e")], 3) == [fresh("d")]  # machine c is gone
    assert newcomers(LAST, [*here, running("c"), fresh("e"), fresh("d")], 5) == [fresh("d"), fresh("e")]
    assert newcomers(Membership(), [fresh("a")], 3) == []


def test_machines_that_prepare_count_where_the_others_are_too_few() -> None:
    here = [running("a"), running("b")]
    preparing = fresh("d")._replace(readiness=Readiness.PREPARING)
    ready = fresh("e")._replace(readiness=Readiness.READY)
    assert counted(LAST, [preparing, *here], 2) == here
    assert counted(LAST, [preparing, *here, ready], 2) == [*here, ready]
    assert counted(LAST, [preparing, *here], 3) == [preparing, *here]
    taken = running("c")._replace(readiness=Readiness.PREPARING)
    assert counted(LAST, [*here, taken], 2) == [*here, taken], "the others wait for it"


@pytest.mark.parametrize(
    ("bases", "machines", "has_claimed", "right"),
    [
        ("", "a", False, Right.MAJORITY),
        ("abc", "bc", False, Right.MAJORITY),
        ("abc", "a", True, Right.NONE),
        ("abcd", "bcd", False, Right.MAJORITY),
        ("abcd", "ad", False, Right.FIRST_HALF),
        ("abcd", "bc", True, Right.OTHER_HALF),
        ("abcd", "bc", False, Right.NONE),
        ("ab", "b", True, Right.OTHER_HALF),
        ("abcd abc", "bc", True, Right.OTHER_HALF),
        ("abc ab", "bc", True, Right.NONE),
        ("abc ba", "bc", True, Right.FIRST_HALF),
        ("abcd de", "abc", True, Right.NONE),
    ],
)
def test_who_may_follow(bases: str, machines: str, has_claimed: bool, right: Right) -> None:
    past = [membership(number, names) for number, names in enumerate(bases.split(), start=1)]
    assert right_to_follow(past, machines, has_claimed) is right


def test_a_confirmed_membership_replaces_what_led_to_it() -> None:
    four, five, other = membership(4, "ab"), membership(5, "ab"), membership(4, "ac")
    assert bases_of([fresh("a")]) == ()
    assert bases_of([returned("a"), returned("b")]) == (LAST,)
    assert bases_of([returned("a", LAST, four), returned("c")]) == (LAST, four)
    assert bases_of([returned("a", LAST, four), returned("c", LAST, other)]) == (LAST, four, other)
    assert bases_of([returned("a", LAST, four, five), returned("b", four), returned("c", LAST, other)]) == (four, five)


@st.composite
def situations(draw: st.DrawFn) -> tuple[Membership, list[Machine], int, int]:
    names = draw(st.permutations("abcdef"))
    last = membership(draw(st.integers(1, 4)), "".join(names[: draw(st.integers(0, 4))]))
    alive = []
    for name in sorted(draw(st.sets(st.sampled_from("abcdef")))):
        earlier = membership(last.number - 1, "xyz")
        pasts = [earlier, last] if name in last.machines else [None, earlier]
        past = draw(st.sampled_from(pasts))
        alive.append(Machine(ord(name), name, name, () if past is None else (past,), draw(st.booleans())))
    least = draw(st.integers(1, 4))
    return last, alive, least, draw(st.integers(least, 5))


@given(situations(), st.booleans())
def test_a_membership_follows_the_last_one(situation: tuple[Membership, list[Machine], int, int], over: bool) -> None:
    last, alive, least, most = situation
    found = next_membership(last, alive, least, most, over)
    if found is None:
        return
    now, here = found.membership, {machine.id: machine for machine in alive}
    stayed = [name for name in last.machines if name in here]
    assert least <= len(now.machines) <= most
    assert len(set(now.machines)) == len(now.machines)
    assert set(now.machines) <= set(here)
    assert now.number > max([last.number, *(machine.last.number for machine in alive)])
    assert all(here[name].last == last for name in stayed), "a machine still runs in the last one"
    assert list(now.machines[: len(stayed)]) == stayed[:most], "who stays keeps the order, before all newcomers"


@given(situations())
def test_who_runs_does_not_wait(situation: tuple[Membership, list[Machine], int, int]) -> None:
    last, alive, _, most = situation
    here = waiting(last, alive)
    assert all(machine.last == last for machine in here if machine.id in last.machines)
    coming = newcomers(last, alive, most)
    assert not {machine.id for machine in coming} & set(last.machines)
    assert len(coming) + sum(machine.id in last.machines for machine in alive) <= max(most, len(last.machines))


@given(situations(), st.booleans(), st.sets(st.sampled_from("ghi"), min_size=1), st.randoms())
def test_machines_that_prepare_neither_displace_nor_delay_others(
    situation: tuple[Membership, list[Machine], int, int], over: bool, names: set[str], order: random.Random
) -> None:
    last, alive, least, most = situation
    last = last._replace(number=last.number if last.machines else 0)
    come_again = membership(last.number - 1, "ghi") if last.number > 1 else Membership()
    preparing = [
        Machine(place - 5, name, name, (come_again,) * bool(come_again.number), readiness=Readiness.PREPARING)
        for place, name in enumerate(names)
    ]  # the first to arrive
    everyone = [*alive, *preparing]
    order.shuffle(everyone)
    count = counted(last, everyone, least)
    if len(alive) < least:
        assert set(count) == set(everyone)
        return
    alone, found = (next_membership(last, each, least, most, over) for each in (alive, count))
    if alone is None:
        assert found is None
    else:
        assert found is not None
        assert (found.membership.machines, found.bases, found.right) == (
            alone.membership.machines, alone.bases, alone.right,
        )  # fmt: skip
    assert newcomers(last, count, most) == newcomers(last, alive, most)


@given(situations(), st.booleans(), st.sets(st.sampled_from("ghi"), min_size=1), st.randoms(), st.booleans())
def test_machines_whose_ranks_would_end_those_that_stay_join_later(
    situation: tuple[Membership, list[Machine], int, int], over: bool, names: set[str], order: random.Random, only: bool
) -> None:
    """Members wait in their processes, and some newcomers can join them there."""
    last, alive, least, most = situation
    members = [each._replace(stays=True, past=(last,)) for each in alive if each.id in last.machines]
    ready = [each._replace(readiness=Readiness.READY, past=()) for each in alive if each.id not in last.machines]
    others = [Machine(place - 5, name, name) for place, name in enumerate(names)]  # the first to arrive
    for store in (last, Membership()):  # also a new one
        everyone = [*members, *ready, *others]
        order.shuffle(everyone)
        count = counted(store, everyone, least, only)
        found = next_membership(store, count, least, most, over, only)
        if members and len(members) + len(ready) >= least:
            assert {each.id for each in count} == {each.id for each in (*members, *ready)}
            assert found == next_membership(store, [*members, *ready], least, most, over, only)
        else:
            assert set(count) == set(everyone), "the others are needed"
        if found is not None:
            now = found.membership
            coming = newcomers(now, counted(now, everyone, least, only), most)
            outside = len(everyone) - len(now.machines)
            assert len(coming) == min(outside, most - len(now.machines)), "they are announced in the one that follows"


@pytest.mark.parametrize(
    ("members", "names"),
    [
        ([returned("a", stays=True), returned("b", stays=True)], "ab"),
        ([returned("a", stays=True), returned("b")], "abd"),
        ([returned("a", stays=True), running("b")], "abd"),
        ([returned("a", stays=True)], "ad"),
        ([running("a"), running("b")], "abd"),
    ],
)
def test_a_machine_that_has_not_started_counts_unless_all_members_stay(members: list[Machine], names: str) -> None:
    assert "".join(each.id for each in counted(LAST, [*members, fresh("d")], 2)) == names
    assert "".join(each.id for each in counted(LAST, [*members, fresh("d")], 3))[-1] == "d", "too few without it"


def test_a_machine_that_has_not_started_counts_where_the_others_have_a_weaker_right_without_it() -> None:
    """The members are two of three that went on from five, but it is not known whether all three have heard of it."""
    before, last = membership(3, "abcde"), membership(4, "abc")
    members = [returned(name, before, last, stays=True) for name in "ab"]
    old = Machine(9, "d", "host-d", (before,))
    assert counted(last, [*members, old], 2) == [*members, old]
    assert formed(last, *counted(last, [*members, old], 2)) == "abd"
    assert counted(last, [*members, old], 2, is_only_store=True) == members
    assert counted(last, [*members, fresh("f")], 2) == members


MASKS, PLACES = st.integers(0, 31), st.integers(0, 4)
ACTIONS = st.tuples(
    st.sampled_from(
        ["split", "meet", "connect", "form", "hear", "hear", "confirm", "claim", "lose", "restart", "prepare", "stay"]
    ),
    st.one_of(MASKS, st.just(31)),
    PLACES,
)


@pytest.mark.slow
@settings(max_examples=300)
@given(st.lists(ACTIONS, max_size=60), st.booleans(), st.booleans(), st.integers(2, 5))
def test_there_are_never_two_live_memberships(
    steps: list[tuple[str, int, int]], is_shared: bool, claims: bool, machines: int
) -> None:
    """A run on some machines, of which any are cut off, lost or late, at any time and in any order."""
    with tempfile.TemporaryDirectory() as folder:
        network = Network(Path(folder), is_shared, claims)
        for action in ("meet", "hear", "claim", "confirm"):
            network.step(action, 2**machines - 1, 0)
        for step in steps:
            network.step(*step)
            assert len(network.live()) <= 1, network.live()
