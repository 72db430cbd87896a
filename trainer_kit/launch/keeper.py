"""`Keeper`: decides which machines train together, on the machine that serves the store.

Keys of the store. Each machine takes a number N from `machines`, writes `machine/N` and adds 1 to `beat/N` again and
again. The keeper publishes `membership`, who is `here`, the port of its `presence`, and `ended` when the run is over or
its own machine gives up. What machines exchange about a membership is under its number, such as `3/trainer_kit/change`.
"""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Callable
from enum import Enum
from typing import NamedTuple

from torch._C._distributed_c10d import PrefixStore, Store

from trainer_kit.errors import ProcessFailed
from trainer_kit.launch.config import LaunchConfig
from trainer_kit.launch.membership import (
    Formed,
    Machine,
    Membership,
    Readiness,
    Right,
    counted,
    newcomers,
    newest,
    next_membership,
    right_of,
    right_to_follow,
    waiting,
)
from trainer_kit.launch.news import CHANGE, FAILED, GONE, LOST, OUTCOME, Change, News, opening
from trainer_kit.utils.units import format_duration, join_names

MACHINES, MEMBERSHIP, ENDED, HERE, PRESENCE = "machines", "membership", "ended", "here", "presence"
BEGUN = "begun"
"""Number of the first membership of the store that began."""

_LOOK_SECONDS = 0.1
_PAUSE_SECONDS = 1.0
_LOST_SECONDS = 25.0  # the ranks of the others notice a lost machine before, unless they are just starting
_LAST_CALL_SECONDS = 10.0  # at the new store of a run under way, whose machines notice a loss at about the same time
_HANDING_OVER_SECONDS = 15.0
_PARTING_SECONDS = 300.0  # as long as torch's agent waits for the others at the end


class End(str, Enum):
    """How a run has ended for the machines of a store; where they say different things, the first one here counts."""

    OVER = "over"
    """The ranks have done their work."""

    LEFT = "left"
    """The ranks have left because of a signal."""

    FAILED = "failed"
    """A rank has failed, or a launcher."""

    TIMED_OUT = "timed out"
    """The machine with the store has waited for others in vain."""

    GIVEN_UP = "given up"
    """They may not continue, but others may."""


def machine_key(number: int) -> str:
    """Return the key of what a machine says about itself."""
    return f"machine/{number}"


def beat_key(number: int) -> str:
    """Return the key of a machine's signs of life."""
    return f"beat/{number}"


class Facts(NamedTuple):
    """What a machine says about itself; see `Machine`.

    Attributes:
        id: Unique ID of the launcher.
        host: Host name.
        past: Its memberships.
        has_claimed: Whether the output folder has been claimed.
        is_candidate: Whether it can serve the store.
        end: How the run has ended for the machine; None as long as it is there.
        readiness: What its ranks do.
        stays: Whether they wait in their processes.
    """

    id: str
    host: str
    past: tuple[Membership, ...] = ()
    has_claimed: bool = False
    is_candidate: bool = False
    end: End | None = None
    readiness: Readiness = Readiness.NOT_STARTED
    stays: bool = False

    def to_json(self) -> str:
        """Return the text of the store."""
        return json.dumps(self)

    @classmethod
    def from_json(cls, text: str | bytes) -> Facts:
        """Read the text of the store."""
        own, host, past, has_claimed, is_candidate, end, readiness, stays = json.loads(text)
        memberships, how = tuple(map(Membership.of, past)), None if end is None else End(end)
        return cls(own, host, memberships, has_claimed, is_candidate, how, Readiness(readiness), stays)


class Published(NamedTuple):
    """A membership as the machines read it.

    Attributes:
        membership: The membership.
        numbers: Numbers of its machines in this store, by place.
        bases: See `Formed`.
        right: See `Formed`.
        gone: Hosts that belonged to the membership before, but not to this one.
        joined: Hosts that belong to this one, but not to the one before; empty for the first.
        port: Port of the store of its ranks, on the machine that serves this store.
    """

    membership: Membership = Membership()
    numbers: tuple[int, ...] = ()
    bases: tuple[Membership, ...] = ()
    right: Right = Right.MAJORITY
    gone: tuple[str, ...] = ()
    joined: tuple[str, ...] = ()
    port: int = 0

    def to_json(self) -> str:
        """Return the text of the store."""
        return json.dumps(self)

    @classmethod
    def from_json(cls, text: str | bytes) -> Published:
        """Read the text of the store."""
        membership, numbers, bases, right, gone, joined, port = json.loads(text)
        past = tuple(map(Membership.of, bases))
        return cls(Membership.of(membership), tuple(numbers), past, Right(right), tuple(gone), tuple(joined), port)

    def describe(self, config: LaunchConfig) -> list[str]:
        """Return what the user needs to know of it, where the number of machines may change.

        Args:
            config: Launch configuration.
        """
        if config.min_nodes is None:
            return []
        of = f"{len(self.membership.machines)} of {config.num_nodes} machines"
        if self.bases:
            return [f"{self._describe_change()}: {of} continue"] if self.gone or self.joined else []
        first, *others = config.candidates
        limit = format_duration(config.meeting_seconds)
        if others:
            then = f"{first} serves the store, and if it is lost, the next one of {', '.join(others)}"
        else:
            then = f"if the one at {first} is lost, which serves the store, the others wait up to {limit} for it"
        return [f"{of}, {config.min_nodes} are enough; {then}"]

    def _describe_change(self) -> str:
        parts = []
        if self.gone:
            parts.append(f"{', '.join(self.gone)} {'is' if len(self.gone) == 1 else 'are'} gone")
        if self.joined:
            parts.append(f"{', '.join(self.joined)} {'has' if len(self.joined) == 1 else 'have'} joined")
        return " and ".join(parts)


class Here(NamedTuple):
    """The machines that wait in a store.

    Attributes:
        total: Their number.
        hosts: Hosts of those that belonged to the newest membership, by place.
        of: Number of machines of that membership.
        has_first: Whether its first machine waits.
        may_follow: Whether they may form the next membership if they are enough.
    """

    total: int = 0
    hosts: tuple[str, ...] = ()
    of: int = 0
    has_first: bool = False
    may_follow: bool = True

    def to_json(self) -> str:
        """Return the text of the store."""
        return json.dumps(self)

    @classmethod
    def from_json(cls, text: str | bytes) -> Here:
        """Read the text of the store."""
        total, hosts, *rest = json.loads(text)
        return cls(total, tuple(hosts), *rest)

    def describe(self, own: str) -> str:
        """Return who is here of the newest membership.

        Args:
            own: Host of the machine that says so.
        """
        names = ["this machine"] * (own in self.hosts) + [host for host in self.hosts if host != own]
        if not names:
            return f"none of {self.of} machines has come"
        is_half = 2 * len(self.hosts) == self.of and not self.has_first
        who = f"{join_names(names)} {'is' if len(names) == 1 else 'are'}"
        return f"{who} {len(self.hosts)} of {self.of}{', without the first one' if is_half else ''}"

    def missing(self, own: str, config: LaunchConfig) -> str:
        """Return whom the machines wait for.

        Args:
            own: See `describe`.
            config: Launch configuration.
        """
        if not self.may_follow:
            return f"the other machines, since {self.describe(own)}"
        least = f"at least {config.min_nodes}" if config.min_nodes else config.num_nodes
        return f"a machine ({self.total} of {least} came)"


class Keeper:
    """Watches the machines' signs of life and publishes memberships.

    It counts signs of life by its own clock, since the clocks of machines differ.

    Args:
        store: A client of the store for the keeper alone.
        least: Smallest number of machines.
        most: Largest number of machines.
        last_call: Seconds to wait for more machines than the smallest number before the first membership. A store that
            follows a lost one waits for 10 s at most.
        patience: Seconds without a sign of life after which a machine counts as gone.
        serve_ranks: Serves an empty store for the ranks of a new membership and returns its port.
        clock: Returns the time in seconds.
        ended: Numbers of machines whose launchers have ended, see `Presence`; None: unknown.
        is_only_store: See `next_membership`.
    """

    def __init__(
        self,
        store: Store,
        least: int,
        most: int,
        last_call: float,
        patience: float,
        serve_ranks: Callable[[], int],
        clock: Callable[[], float] = time.monotonic,
        ended: deque[int] | None = None,
        is_only_store: bool = False,
    ) -> None:
        self._store = store
        self._least, self._most, self._last_call, self._patience = least, most, last_call, patience
        self._serve_ranks, self._clock, self._is_only_store = serve_ranks, clock, is_only_store
        self._last = Membership()
        self._numbers: dict[str, int] = {}  # the newest number of each machine, by ID
        self._published: tuple[int, ...] = ()
        self._hosts: dict[str, str] = {}
        self._beats: dict[int, tuple[bytes, float]] = {}
        self._arrived = self._looked = clock()
        self._here = Here()
        self._alive: list[Machine] = []
        self._counted: list[Machine] = []  # those of them that count for the next membership
        self._left: dict[str, End] = {}
        self._lost: list[str] = []  # as the machines of the last membership know it
        self._ended: deque[int] = deque() if ended is None else ended
        self._gone: set[int] = set()  # launchers that have ended, unless they give another sign of life
        self._done = threading.Event()
        self._thread: threading.Thread | None = None
        store.set(MEMBERSHIP, Published().to_json())
        store.set(HERE, self._here.to_json())

    def start(self) -> None:
        """Start the thread that looks at the store."""
        self._thread = threading.Thread(target=self._run, name="trainer_kit keeper", daemon=True)
        self._thread.start()

    def stop(self, is_hurried: Callable[[], bool], end: End = End.OVER) -> None:
        """Announce the end of the run, and wait until the machines have heard of it and have left.

        Args:
            is_hurried: Returns whether to stop waiting.
            end: How it has ended.
        """
        self.halt()
        self._store.set(ENDED, end.value)
        deadline = time.monotonic() + _PARTING_SECONDS
        while time.monotonic() < deadline and not is_hurried():
            self.look()
            if not self._alive:
                return
            time.sleep(_LOOK_SECONDS)

    def halt(self) -> None:
        """End the thread, without a word to the machines."""
        self._done.set()
        if self._thread is not None:
            self._thread.join()

    def hand_over(self, own: str) -> None:
        """End without the end of the run, once the other machines of the membership wait for the next one.

        Args:
            own: ID of the machine that serves the store, and leaves.
        """
        self.halt()
        deadline = time.monotonic() + _HANDING_OVER_SECONDS
        while time.monotonic() < deadline:
            self._read_machines()
            members = [machine for machine in self._alive if machine.id in self._last.machines and machine.id != own]
            if all(machine.last == self._last for machine in members):
                return
            time.sleep(_LOOK_SECONDS)

    def alive(self) -> int:
        """Return how many machines of the last membership give signs of life."""
        return sum(machine.id in self._last.machines for machine in self._alive)

    def can_go_on_without(self, own: str, has_claimed: bool) -> bool:
        """Return whether the other machines of the last membership may follow it, and one of them can serve the store.

        Args:
            own: ID of the machine that serves it now.
            has_claimed: See `right_to_follow`.
        """
        rest = [machine for machine in self._alive if machine.id in self._last.machines and machine.id != own]
        right = right_to_follow((self._last,), [machine.id for machine in rest], has_claimed)
        return right is not Right.NONE and any(machine.is_candidate for machine in rest)

    def look(self) -> None:
        """Read the signs of life; publish a membership, or that a machine can join, where it is time."""
        self._read_machines()
        if self._store.check([ENDED]):
            return
        if self._last.machines and self._left.keys() >= set(self._last.machines):
            ends = [self._left[machine] for machine in self._last.machines]
            self._store.set(ENDED, next(end for end in End if end in ends).value)
            return
        begins = not any(machine.past for machine in self._counted)
        last_call = self._last_call if begins else min(self._last_call, _LAST_CALL_SECONDS)
        is_over = self._clock() - self._arrived >= last_call
        formed = next_membership(self._last, self._counted, self._least, self._most, is_over, self._is_only_store)
        if formed is not None:
            self._publish(formed)
        else:
            self._announce_changes()
        here = self._count()
        if here != self._here:
            self._here = here
            self._store.set(HERE, here.to_json())

    def _count(self) -> Here:
        here = waiting(self._last, self._counted)
        before = newest(self._last, here)
        ids = [machine.id for machine in here]
        hosts = tuple(host for machine, host in zip(before.machines, before.hosts, strict=True) if machine in ids)
        has_first = bool(before.machines) and before.machines[0] in ids
        may_follow = right_of(here, self._is_only_store) is not Right.NONE
        return Here(len(here), hosts, len(before.machines), has_first, may_follow)

    def _announce_changes(self) -> None:
        """Announce in the running membership which machines can join, which are lost, and that it cannot begin."""
        running = PrefixStore(str(self._last.number), self._store)
        if (change := self._joining(running)) is not None:
            running.compare_set(CHANGE, "", change.to_json())
        staying = [machine for machine in self._last.machines if machine not in self._left]
        alive = {machine.id for machine in self._alive}
        if not {machine.number for machine in self._alive}.issuperset(self._published):  # also one that came again
            running.compare_set(OUTCOME, "", GONE)
        if (lost := [machine for machine in staying if machine not in alive]) != self._lost:
            self._lost = lost
            running.set(LOST, join_names([self._hosts[machine] for machine in lost]))
        for machine in staying:
            seconds = self._looked - self._beats[self._numbers[machine]][1]
            if seconds > max(_LOST_SECONDS, self._patience):
                text = f"{self._hosts[machine]} has not answered for {format_duration(seconds)}"
                news = News(ProcessFailed(text, rank=-1, exit_code=None), goes_on=True, is_loss=True)
                running.compare_set(FAILED, "", news.to_json())

    def _joining(self, running: Store) -> Change | None:
        """Return which machines can join the running membership, and how; None without any.

        Those that are ready wait until it is open.
        """
        coming = newcomers(self._last, self._counted, self._most)
        in_process = any(machine.readiness is Readiness.READY for machine in coming) and bool(opening(running))
        if not in_process:
            coming = [machine for machine in coming if machine.readiness is not Readiness.READY]
        if not coming:
            return None
        in_process &= all(machine.readiness is Readiness.READY for machine in coming)
        names = ", ".join(machine.host for machine in coming)
        verb, whom = ("joins", "it") if len(coming) == 1 else ("join", "them")
        saves = "" if in_process else "saves and "
        return Change(f"{names} {verb}: the run {saves}continues with {whom}", is_joining=True, in_process=in_process)

    def _run(self) -> None:
        while not self._done.wait(_LOOK_SECONDS):
            self.look()

    def _read_machines(self) -> None:
        now = self._clock()
        pause = now - self._looked
        if pause > _PAUSE_SECONDS:  # this process stood still, and signs of life may be on their way
            self._beats = {number: (beat, changed + pause) for number, (beat, changed) in self._beats.items()}
        self._looked = now
        for number in range(self._store.add(MACHINES, 0)):
            if number not in self._beats and self._store.check([machine_key(number), beat_key(number)]):
                self._beats[number], self._arrived = (b"", now), now
        numbers = sorted(self._beats)
        raw = self._store.multi_get([*map(machine_key, numbers), *map(beat_key, numbers)]) if numbers else []
        facts = dict(zip(numbers, map(Facts.from_json, raw[: len(numbers)]), strict=True))
        self._numbers = {own.id: number for number, own in facts.items()}
        newest_facts = [own for number, own in facts.items() if self._numbers[own.id] == number]
        self._left = {own.id: own.end for own in newest_facts if own.end is not None}
        self._alive = []
        for number, beat in zip(numbers, raw[len(numbers) :], strict=True):
            own = facts[number]
            self._hosts[own.id] = own.host
            if beat != self._beats[number][0]:
                self._beats[number] = (beat, now)
                self._gone.discard(number)
            is_silent = now - self._beats[number][1] > self._patience
            if own.end is None and not is_silent and self._numbers[own.id] == number:
                is_new = number not in self._published
                rest = own.past, own.has_claimed, own.is_candidate, own.readiness, own.stays
                self._alive.append(Machine(number, own.id, own.host, *rest, is_new))
        while self._ended:
            number = self._ended.popleft()
            self._gone.add(number)
            if number in self._beats:  # the last one may have come since they were read
                self._beats[number] = (self._store.get(beat_key(number)), self._beats[number][1])
        self._alive = [machine for machine in self._alive if machine.number not in self._gone]
        self._counted = counted(self._last, self._alive, self._least, self._is_only_store)

    def _publish(self, formed: Formed) -> None:
        before, now = newest(self._last, waiting(self._last, self._counted)), formed.membership
        gone = tuple(host for own, host in zip(before.machines, before.hosts, strict=True) if own not in now.machines)
        joined = tuple(self._hosts[own] for own in now.machines if before.number and own not in before.machines)
        numbers = tuple(self._numbers[own] for own in now.machines)
        self._last, self._published, self._lost = now, numbers, []
        published = Published(now, numbers, formed.bases, formed.right, gone, joined, self._serve_ranks())
        self._store.set(MEMBERSHIP, published.to_json())
