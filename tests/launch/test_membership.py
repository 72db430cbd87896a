"""Which machines form the next membership."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from trainer_kit.launch.membership import Machine, Membership, newcomers, next_membership, waiting

LAST = Membership(3, (0, 1, 2), "run")


def running(number: int) -> Machine:
    return Machine(number, f"host-{number}", after=2, place=number, run="run")


def returned(number: int) -> Machine:
    return Machine(number, f"host-{number}", after=3, place=number, run="run")


def fresh(number: int) -> Machine:
    return Machine(number, f"host-{number}")


def formed(last: Membership, *alive: Machine, least: int = 2, most: int = 3, over: bool = False) -> tuple[int, ...]:
    found = next_membership(last, alive, least, most, over)
    return () if found is None else found.machines


def test_the_first_membership_waits_for_all_or_for_the_last_call() -> None:
    start = Membership()
    assert formed(start, fresh(0)) == formed(start, fresh(0), over=True) == ()
    assert formed(start, fresh(0), fresh(1)) == ()
    assert formed(start, fresh(0), fresh(1), over=True) == (0, 1)
    assert formed(start, fresh(2), fresh(0), fresh(1)) == (0, 1, 2)
    assert formed(start, *map(fresh, range(4))) == (0, 1, 2)


def test_those_that_stay_go_on_at_once_when_all_that_live_have_come() -> None:
    assert formed(LAST, returned(0), running(1), running(2)) == ()
    assert formed(LAST, returned(0), returned(2), running(1)) == ()
    assert formed(LAST, returned(2), returned(0)) == (0, 2)
    assert formed(LAST, returned(2), least=1) == (2,)
    assert formed(LAST, returned(2)) == ()


def test_newcomers_take_the_places_after_those_that_stay() -> None:
    assert formed(LAST, fresh(3), returned(2), fresh(4), returned(1)) == (1, 2, 3)
    assert formed(LAST, returned(0), returned(1), returned(2), fresh(3)) == (0, 1, 2)


def test_machines_of_a_lost_store_keep_their_order() -> None:
    """A new store numbers them again, in any order; its own machine may be new."""
    alive = [fresh(0), Machine(1, "c", 5, 2, "run"), Machine(2, "b", 5, 1, "run"), Machine(3, "d", 4, 0, "run")]
    assert next_membership(Membership(), alive, 2, 4, False) == Membership(6, (2, 1, 0, 3), "run")
    assert next_membership(Membership(), alive[:3], 2, 4, False) is None
    assert next_membership(Membership(), alive[:3], 2, 4, True) == Membership(6, (2, 1, 0), "run")


def test_each_run_has_its_own_id() -> None:
    first, second = (next_membership(Membership(), [fresh(0)], 1, 1, False) for _ in range(2))
    assert first is not None
    assert second is not None
    assert first.run != second.run


def test_newcomers_are_those_for_which_there_is_room() -> None:
    here = [running(0), running(1)]
    assert newcomers(LAST, [*here, running(2), fresh(3)], 3) == []
    assert newcomers(LAST, [*here, fresh(3), fresh(4)], 3) == [fresh(3)]  # machine 2 is gone
    assert newcomers(LAST, [*here, running(2), fresh(4), fresh(3)], 5) == [fresh(3), fresh(4)]
    assert newcomers(Membership(), [fresh(0)], 3) == []


@st.composite
def situations(draw: st.DrawFn) -> tuple[Membership, list[Machine], int, int]:
    numbers = draw(st.permutations(range(6)))
    last = Membership(draw(st.integers(1, 4)), tuple(numbers[: draw(st.integers(0, 4))]), "run")
    alive = []
    for number in draw(st.sets(st.integers(0, 5))):
        if number in last.machines:
            after = draw(st.sampled_from([last.number - 1, last.number]))
            place = last.machines.index(number)
        else:
            after, place = draw(st.sampled_from([(0, -1), (last.number - 1, 5)]))
        alive.append(Machine(number, str(number), after, place, "run" if after else ""))
    least = draw(st.integers(1, 4))
    return last, alive, least, draw(st.integers(least, 5))


@given(situations(), st.booleans())
def test_a_membership_follows_the_last_one(situation: tuple[Membership, list[Machine], int, int], over: bool) -> None:
    last, alive, least, most = situation
    found = next_membership(last, alive, least, most, over)
    if found is None:
        return
    here = {machine.number: machine for machine in alive}
    stayed = [number for number in last.machines if number in here]
    assert least <= len(found.machines) <= most
    assert len(set(found.machines)) == len(found.machines)
    assert set(found.machines) <= set(here)
    assert found.number > max([last.number, *(machine.after for machine in alive)])
    assert all(here[number].after == last.number for number in stayed), "a machine still runs in the last one"
    assert list(found.machines[: len(stayed)]) == stayed[:most], "who stays keeps the order, before all newcomers"


@given(situations())
def test_who_runs_does_not_wait(situation: tuple[Membership, list[Machine], int, int]) -> None:
    last, alive, _, most = situation
    here = waiting(last, alive)
    assert all(machine.after == last.number for machine in here if machine.number in last.machines)
    coming = newcomers(last, alive, most)
    assert not {machine.number for machine in coming} & set(last.machines)
    assert len(coming) + sum(machine.number in last.machines for machine in alive) <= max(most, len(last.machines))
