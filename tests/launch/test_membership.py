"""Which machines form the next membership, and that there is never more than one."""

from __future__ import annotations

import dataclasses
import random
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer_kit.errors import CutOffError
from trainer_kit.launch.membership import (
    Formed,
    Machine,
    Membership,
    Readiness,
    Right,
    bases_of,
    newcomers,
    next_membership,
    right_to_follow,
    waiting,
    without_preparing,
)
from trainer_kit.utils.membership_claim import MembershipClaim, MembershipPlace


def membership(number: int, machines: str) -> Membership:
    return Membership(number, tuple(machines), "run", tuple(f"host-{machine}" for machine in machines))


BEFORE, LAST = membership(2, "abc"), membership(3, "abc")


def running(machine: str) -> Machine:
    return Machine(ord(machine), machine, f"host-{machine}", (BEFORE,))


def returned(machine: str, *past: Membership, has_claimed: bool = False) -> Machine:
    return Machine(ord(machine), machine, f"host-{machine}", past or (LAST,), has_claimed)


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
    assert without_preparing(LAST, [preparing, *here], 2) == here
    assert without_preparing(LAST, [preparing, *here, ready], 2) == [*here, ready]
    assert without_preparing(LAST, [preparing, *here], 3) == [preparing, *here]
    taken = running("c")._replace(readiness=Readiness.PREPARING)
    assert without_preparing(LAST, [*here, taken], 2) == [*here, taken], "the others wait for it"


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
    counted = without_preparing(last, everyone, least)
    if len(alive) < least:
        assert set(counted) == set(everyone)
        return
    alone, found = (next_membership(last, each, least, most, over) for each in (alive, counted))
    if alone is None:
        assert found is None
    else:
        assert found is not None
        assert (found.membership.machines, found.bases, found.right) == (
            alone.membership.machines, alone.bases, alone.right,
        )  # fmt: skip
    assert newcomers(last, counted, most) == newcomers(last, alive, most)


@dataclasses.dataclass
class Launcher:
    """What a launcher knows, and which store it is connected to."""

    id: str
    past: tuple[Membership, ...] = ()
    has_claimed: bool = False
    is_outvoted: bool = False
    is_preparing: bool = False
    store: int = -1
    number: int = -1


@dataclasses.dataclass
class Server:
    """A store: what machines have written there, and the membership that its keeper has published."""

    facts: dict[int, Machine] = dataclasses.field(default_factory=dict)
    last: Membership = dataclasses.field(default_factory=Membership)
    numbers: tuple[int, ...] = ()


class Network:
    """Launchers that lose and find stores in any order, with messages that come late or never.

    Args:
        folder: Folder of the claims.
        is_shared: Whether all machines see one output folder.
        claims: Whether main processes claim it.
    """

    def __init__(self, folder: Path, is_shared: bool, claims: bool) -> None:
        self.folder, self.is_shared, self.claims = folder, is_shared, claims
        self.launchers = [Launcher(name) for name in "abcde"]
        self.servers = [Server() for _ in self.launchers]
        self.formed: dict[Membership, Formed] = {}
        self.heard: dict[Membership, set[str]] = {}
        self.claimed: dict[Membership, bool] = {}
        self.connections = self.starts = 0

    def step(self, action: str, which: int, place: int) -> None:
        """Take a step of the launchers whose bits are set in `which`, or of the store of a machine."""
        launchers = [launcher for number, launcher in enumerate(self.launchers) if which >> number & 1]
        if action == "split":
            self.step("meet", which, place)
            self.step("meet", 31 - which, (place + 1) % 5)
        elif action == "meet":
            for launcher in launchers:
                self.connect(launcher, place)
            self.form(self.servers[place], silent=31 - which)
        elif action == "form":
            self.form(self.servers[place], silent=which)
        elif action == "lose":
            self.lose(place)
        elif action == "restart":
            self.starts += 1
            self.launchers[place] = Launcher(f"{self.launchers[place].id[0]}{self.starts}")
        own: dict[str, Callable[[Launcher], None]] = {
            "connect": lambda launcher: self.connect(launcher, place),
            "hear": self.hear,
            "confirm": self.confirm,
            "claim": self.claim,
            "prepare": self.prepare,
        }
        if action in own:
            for launcher in launchers:
                own[action](launcher)

    def lose(self, place: int) -> None:
        self.servers[place] = Server()
        for launcher in self.launchers:
            launcher.store = -1 if launcher.store == place else launcher.store

    def connect(self, launcher: Launcher, place: int) -> None:
        if launcher.store != place:
            self.connections += 1
            launcher.store, launcher.number = place, self.connections
        self.announce(launcher)

    def announce(self, launcher: Launcher) -> None:
        if launcher.store >= 0:
            readiness = Readiness.PREPARING if launcher.is_preparing else Readiness.NOT_STARTED
            own = launcher.number, launcher.id, launcher.id, launcher.past, launcher.has_claimed
            facts = Machine(*own, readiness=readiness)
            self.servers[launcher.store].facts[launcher.number] = facts

    def form(self, server: Server, silent: int) -> None:
        """Any machine may be silent, and a lost one may seem to be there."""
        newest = {facts.id: facts for _, facts in sorted(server.facts.items())}
        alive = [
            facts._replace(is_new=facts.number not in server.numbers)
            for facts in newest.values()
            if not silent >> "abcde".index(facts.id[0]) & 1
        ]
        found = next_membership(server.last, without_preparing(server.last, alive, 1), 1, 5, True)
        if found is not None and (server.last.number or found.bases or not self.formed):  # a run begins once
            server.last = found.membership
            server.numbers = tuple(newest[machine].number for machine in found.membership.machines)
            self.formed[found.membership] = found

    def prepare(self, launcher: Launcher) -> None:
        launcher.is_preparing = not launcher.is_preparing
        self.announce(launcher)

    def hear(self, launcher: Launcher) -> None:
        if launcher.store < 0:
            return
        server = self.servers[launcher.store]
        known = max((past.number for past in launcher.past), default=0)
        if server.last.number > known and launcher.number in server.numbers:
            launcher.past, launcher.is_outvoted = (*self.formed[server.last].bases, server.last), False
            self.heard.setdefault(server.last, set()).add(launcher.id)

    def confirm(self, launcher: Launcher) -> None:
        if launcher.past and self.is_heard(last := launcher.past[-1]):
            if self.claimed.get(last):
                launcher.past, launcher.has_claimed = (last,), True
            elif self.formed[last].right is Right.MAJORITY:
                launcher.past = (last,)
            elif last in self.claimed:
                launcher.past, launcher.is_outvoted = launcher.past[:1], True

    def claim(self, launcher: Launcher) -> None:
        """The launcher's rank is the main process of its membership."""
        if not (self.claims and launcher.past and self.is_heard(last := launcher.past[-1])):
            return
        if last.machines[0] != launcher.id or last in self.claimed:
            return
        found = self.formed[last]
        folder = self.folder / ("shared" if self.is_shared else launcher.id)
        folder.mkdir(exist_ok=True)
        after = found.bases[0].number if found.bases else 0
        place = MembershipPlace("run", last.number, after, found.right is Right.OTHER_HALF)
        try:
            MembershipClaim(folder, "output_dir", place).take()
            self.claimed[last] = True
        except CutOffError:
            self.claimed[last] = False

    def is_heard(self, membership: Membership) -> bool:
        """All of its machines have heard of it, so that their ranks have started."""
        return self.heard.get(membership, set()) >= set(membership.machines)

    def live(self) -> list[Membership]:
        """The memberships that can take a step: all of their machines are still in it."""
        now = {launcher.id: launcher.past[-1:] for launcher in self.launchers if not launcher.is_outvoted}
        begun = [
            each for each, found in self.formed.items()
            if self.is_heard(each)
            and (found.right is Right.MAJORITY or not self.claims or self.claimed.get(each, False))
        ]  # fmt: skip
        return [each for each in begun if all(now.get(machine) == (each,) for machine in each.machines)]


MASKS, PLACES = st.integers(0, 31), st.integers(0, 4)
ACTIONS = st.tuples(
    st.sampled_from(
        ["split", "meet", "connect", "form", "hear", "hear", "confirm", "claim", "lose", "restart", "prepare"]
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
