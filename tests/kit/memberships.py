"""`Network`: launchers of an elastic run that lose and find stores in any order, with no sockets."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

from trainer_kit.errors import CutOffError
from trainer_kit.launch.membership import Formed, Machine, Membership, Readiness, Right, counted, next_membership
from trainer_kit.utils.membership_claim import MembershipClaim, MembershipPlace


@dataclasses.dataclass
class Launcher:
    """What a launcher knows, and which store it is connected to."""

    id: str
    past: tuple[Membership, ...] = ()
    has_claimed: bool = False
    is_outvoted: bool = False
    readiness: Readiness = Readiness.NOT_STARTED
    stays: bool = False
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
            "stay": self.stay,
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
            own = launcher.number, launcher.id, launcher.id, launcher.past, launcher.has_claimed
            facts = Machine(*own, readiness=launcher.readiness, stays=launcher.stays)
            self.servers[launcher.store].facts[launcher.number] = facts

    def form(self, server: Server, silent: int) -> None:
        """Any machine may be silent, and a lost one may seem to be there."""
        newest = {facts.id: facts for _, facts in sorted(server.facts.items())}
        alive = [
            facts._replace(is_new=facts.number not in server.numbers)
            for facts in newest.values()
            if not silent >> "abcde".index(facts.id[0]) & 1
        ]
        found = next_membership(server.last, counted(server.last, alive, 1), 1, 5, True)
        if found is not None and (server.last.number or found.bases or not self.formed):  # a run begins once
            server.last = found.membership
            server.numbers = tuple(newest[machine].number for machine in found.membership.machines)
            self.formed[found.membership] = found

    def prepare(self, launcher: Launcher) -> None:
        """Next it prepares, then it trains without having come to a meeting, then it waits."""
        order = [Readiness.NOT_STARTED, Readiness.PREPARING, Readiness.TRAINING]
        launcher.readiness = order[(order.index(launcher.readiness) + 1) % len(order)]
        self.announce(launcher)

    def stay(self, launcher: Launcher) -> None:
        launcher.stays = not launcher.stays
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
