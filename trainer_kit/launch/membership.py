"""`Membership`: which machines train together, and which ones form the next membership. No sockets in here."""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from typing import NamedTuple


class Machine(NamedTuple):
    """A launcher that is alive, as the keeper of the store sees it.

    Attributes:
        number: Order of arrival, from 0.
        host: Host name.
        after: Number of the membership that its last start belonged to; 0 before the first.
        place: Its place in that membership; -1 before the first.
        run: ID of the run that the membership belonged to; empty before the first.
    """

    number: int
    host: str
    after: int = 0
    place: int = -1
    run: str = ""


class Membership(NamedTuple):
    """Machines that train together.

    Attributes:
        number: Number of the membership; they increase over a run. 0 before the first.
        machines: Numbers of its machines, by place.
        run: ID of the run, which outlives the store.
    """

    number: int = 0
    machines: tuple[int, ...] = ()
    run: str = ""


def waiting(last: Membership, alive: Iterable[Machine]) -> list[Machine]:
    """Return the machines that wait for the next membership: those of the last one first, by place, then by arrival.

    Args:
        last: The newest membership.
        alive: All machines that give signs of life.
    """
    here = [machine for machine in alive if machine.number not in last.machines or machine.after == last.number]
    newest = max((machine.after for machine in here), default=0)

    def order(machine: Machine) -> tuple[bool, int]:
        is_newcomer = machine.after < max(1, newest)
        return is_newcomer, machine.number if is_newcomer else machine.place

    return sorted(here, key=order)


def next_membership(
    last: Membership, alive: Iterable[Machine], least: int, most: int, is_last_call_over: bool
) -> Membership | None:
    """Return the membership that can be formed now; None if there is none.

    It waits for each machine of the last membership that is alive. It takes at most `most` machines, newcomers last.
    With fewer it takes those of the last membership at once, since newcomers can join at any time; a run without a
    last membership waits until the last call is over.

    Args:
        last: The newest membership.
        alive: All machines that give signs of life.
        least: Smallest number of machines.
        most: Largest number of machines.
        is_last_call_over: Whether no machine has arrived for a while.
    """
    alive = list(alive)
    here = waiting(last, alive)
    chosen = here[:most]
    is_complete = len(chosen) == most or any(machine.number in last.machines for machine in chosen)
    are_missing = any(machine.number in last.machines and machine not in here for machine in alive)
    if are_missing or len(chosen) < least or not (is_complete or is_last_call_over):
        return None
    number, run = max((last.number, last.run), *((machine.after, machine.run) for machine in here))
    return Membership(number + 1, tuple(machine.number for machine in chosen), run or uuid.uuid4().hex)


def newcomers(last: Membership, alive: Iterable[Machine], most: int) -> list[Machine]:
    """Return the machines that wait while there is room for them in the running membership.

    Args:
        last: The membership that runs.
        alive: All machines that give signs of life.
        most: Largest number of machines.
    """
    alive = list(alive)
    running = sum(machine.number in last.machines for machine in alive)
    outside = [machine for machine in waiting(last, alive) if machine.number not in last.machines]
    return outside[: max(0, most - running)] if last.machines else []
