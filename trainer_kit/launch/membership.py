"""`Membership`: which machines train together, and which ones may form the next membership. No sockets in here.

Two halves of a cut network must not both continue. Each machine therefore remembers its last *confirmed* membership, of
which all machines have heard, and later ones that it has heard of without knowing whether all have. The next membership
needs more than half of the machines of each of these. Two memberships that follow the same one share a machine then,
and that machine brings the first of them to the second. A membership with exactly half of the machines needs the output
folder, where only one half can create its file. If only one machine can serve a store, no part without it continues,
and the one with it needs no majority.
"""

from __future__ import annotations

import enum
import uuid
from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple


class Membership(NamedTuple):
    """Machines that train together.

    Attributes:
        number: Number of the membership; they increase over a run. 0 before the first.
        machines: IDs of its machines, by place.
        run: ID of the run, which outlives the store.
        hosts: Host names, by place.
    """

    number: int = 0
    machines: tuple[str, ...] = ()
    run: str = ""
    hosts: tuple[str, ...] = ()

    @classmethod
    def of(cls, values: Sequence[Any]) -> Membership:
        """Create a membership from the lists of a JSON text."""
        number, machines, run, hosts = values
        return cls(number, tuple(machines), run, tuple(hosts))


class Readiness(str, enum.Enum):
    """What the ranks of a machine do."""

    TRAINING = "training"
    """They train. If the others have continued without the machine, it takes no place before its launcher has come."""

    NOT_STARTED = "not started"
    """They start with the ranks of all other machines, or continue with them, once the machine has a place."""

    PREPARING = "preparing"
    """They prepare the training alone, or wait until they can: the machine takes no place before they are ready."""

    READY = "ready"
    """They can join the ranks of the others, which stay in their processes."""


class Machine(NamedTuple):
    """A launcher that is alive, as the keeper of the store sees it.

    Attributes:
        number: Order of arrival, from 0.
        id: Unique ID of the launcher.
        host: Host name.
        past: Its last confirmed membership and later ones, by number; empty before the first.
        has_claimed: Whether a process of it has confirmed that the main process claimed the output folder.
        is_candidate: Whether it can serve the store.
        readiness: What its ranks do.
        stays: Whether its ranks wait for the next membership in their processes.
        is_new: Whether it has connected since the keeper published its last membership.
    """

    number: int
    id: str
    host: str
    past: tuple[Membership, ...] = ()
    has_claimed: bool = False
    is_candidate: bool = False
    readiness: Readiness = Readiness.NOT_STARTED
    stays: bool = False
    is_new: bool = False

    @property
    def last(self) -> Membership:
        """The newest membership that it belonged to."""
        return self.past[-1] if self.past else Membership()


class Right(enum.IntEnum):
    """Right to follow the last membership, the weakest last."""

    MAJORITY = 0
    """More than half of the machines, or the first membership."""
    FIRST_HALF = 1
    """Half with the first machine: continues unless the other half has claimed the output folder."""
    OTHER_HALF = 2
    """The other half: continues if it sees the folder of the last main process, and claims it first."""
    NONE = 3
    """The others may still be training."""


class Formed(NamedTuple):
    """A membership that can begin.

    Attributes:
        membership: The membership.
        bases: Memberships that it follows: the last confirmed one, and later ones.
        right: Its right to follow them.
    """

    membership: Membership
    bases: tuple[Membership, ...]
    right: Right


def counted(last: Membership, alive: Iterable[Machine], least: int, is_only_store: bool = False) -> list[Machine]:
    """Return the machines that count for the next membership.

    A machine that the others have left behind counts once it has come to a meeting, or prepares. Machines that prepare
    count only where the others are too few. While the ranks of all members wait in their processes, newcomers count
    that can join them there. Others would end these ranks without a save: they count only where the machines are too
    few without them, or have a weaker right; else they join the membership that follows.

    Args:
        last: The membership that the keeper published last.
        alive: All machines that give signs of life.
        least: Smallest number of machines.
        is_only_store: See `next_membership`.
    """
    alive = [each for each in alive if each.readiness is not Readiness.TRAINING or each.id in last.machines]
    others = [each for each in alive if each.readiness is not Readiness.PREPARING or each.id in last.machines]
    here = waiting(last, others)
    before = newest(last, here)
    members = [each for each in others if each.id in before.machines]
    staying = [each for each in others if each in members or each.readiness is Readiness.READY]
    all_stay = bool(members) and all(each.stays and each in here for each in members)
    if all_stay and len(staying) >= least and right_of(staying, is_only_store) <= right_of(here, is_only_store):
        return staying
    return others if len(others) >= least else alive


def waiting(last: Membership, alive: Iterable[Machine]) -> list[Machine]:
    """Return the machines that wait for the next membership: those of the newest one first, by place, then by arrival.

    Args:
        last: The membership that the keeper published last.
        alive: All machines that give signs of life.
    """
    here = [each for each in alive if each.id not in last.machines or each.is_new or each.last == last]
    places = {machine: place for place, machine in enumerate(newest(last, here).machines)}
    return sorted(here, key=lambda machine: (places.get(machine.id, len(places)), machine.number))


def newest(last: Membership, here: Iterable[Machine]) -> Membership:
    """Return the membership that the next one follows: the keeper's own, or the newest one before its store.

    Args:
        last: See `waiting`.
        here: Machines that wait.
    """
    return max([last, *(machine.last for machine in here)], key=lambda past: past.number) if not last.number else last


def next_membership(
    last: Membership,
    alive: Iterable[Machine],
    least: int,
    most: int,
    is_last_call_over: bool,
    is_only_store: bool = False,
) -> Formed | None:
    """Return the membership that can be formed now; None if there is none.

    It waits for each machine of the last membership that is alive. It takes at most `most` machines, newcomers last.
    With fewer it takes those of the last membership immediately, since newcomers can join at any time. Without a last
    membership in this store it waits for all of the newest one, or until the last call is over.

    Args:
        last: See `waiting`.
        alive: All machines that give signs of life.
        least: Smallest number of machines.
        most: Largest number of machines.
        is_last_call_over: Whether no machine has arrived for a while.
        is_only_store: Whether no other machine can serve a store, so that no other part of the network can continue.
    """
    alive = list(alive)
    here = waiting(last, alive)
    chosen = here[:most]
    ids = [machine.id for machine in chosen]
    before = newest(last, here)
    have_come = bool(before.machines) and set(before.machines) <= set(ids)
    is_complete = len(chosen) == most or have_come or any(machine in last.machines for machine in ids)
    are_missing = any(machine.id in last.machines and machine not in here for machine in alive)
    if are_missing or len(chosen) < least or not (is_complete or is_last_call_over):
        return None
    bases = bases_of(chosen)
    right = right_of(chosen, is_only_store)
    if right is Right.NONE or (last.number and not bases):  # newcomers alone continue no run
        return None
    number = 1 + max([last.number, *(machine.last.number for machine in here)])
    run = before.run or uuid.uuid4().hex
    hosts = tuple(machine.host for machine in chosen)
    return Formed(Membership(number, tuple(ids), run, hosts), bases, right)


def bases_of(machines: Iterable[Machine]) -> tuple[Membership, ...]:
    """Return the memberships that one with these machines follows: the last confirmed one, and later ones.

    Args:
        machines: The machines.
    """
    pasts = [machine.past for machine in machines if machine.past]
    if not pasts:
        return ()
    confirmed = max((past[0] for past in pasts), key=lambda base: base.number)
    later = {base for past in pasts if confirmed in past for base in past if base.number > confirmed.number}
    return confirmed, *sorted(later)


def right_of(machines: Collection[Machine], is_only_store: bool) -> Right:
    """Return the right of machines to follow their memberships.

    Args:
        machines: The machines.
        is_only_store: See `next_membership`.
    """
    has_claimed = any(machine.has_claimed for machine in machines)
    ids = [machine.id for machine in machines]
    return Right.MAJORITY if is_only_store else right_to_follow(bases_of(machines), ids, has_claimed)


def right_to_follow(bases: Sequence[Membership], machines: Collection[str], has_claimed: bool) -> Right:
    """Return the right of machines to follow memberships.

    Args:
        bases: The last confirmed membership, and later ones; empty for a new run.
        machines: IDs of the machines.
        has_claimed: Whether main processes claim the output folder, as far as these machines know. Those of other
            programs do not, so that the other half cannot know whether the first one continues.
    """
    right = Right.MAJORITY
    for base in bases:
        present = sum(machine in machines for machine in base.machines)
        if 2 * present < len(base.machines):
            return Right.NONE
        if 2 * present == len(base.machines):
            if base.machines[0] in machines:
                right = max(right, Right.FIRST_HALF)
            elif base is bases[0] and has_claimed:
                right = Right.OTHER_HALF
            else:
                return Right.NONE
    return right


def newcomers(last: Membership, alive: Iterable[Machine], most: int) -> list[Machine]:
    """Return the machines that wait while there is room for them in the running membership.

    Args:
        last: The membership that runs.
        alive: All machines that give signs of life.
        most: Largest number of machines.
    """
    alive = list(alive)
    running = sum(machine.id in last.machines for machine in alive)
    outside = [machine for machine in waiting(last, alive) if machine.id not in last.machines]
    return outside[: max(0, most - running)] if last.machines else []
