"""`Keeper`: decides which machines train together, on the machine that serves the store."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

from torch._C._distributed_c10d import PrefixStore, Store

from trainer_kit.errors import ProcessFailed
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
from trainer_kit.launch.news import CHANGE, FAILED, GONE, LOST, OUTCOME, Change, News, final_failure, opening
from trainer_kit.launch.published import (
    ENDED,
    HERE,
    MACHINES,
    MEMBERSHIP,
    End,
    Facts,
    Here,
    Published,
    beat_key,
    machine_key,
)
from trainer_kit.utils.units import format_duration, join_names

_LOOK_SECONDS = 0.1
_PAUSE_SECONDS = 1.0
_LOST_SECONDS = 25.0  # the ranks of the others notice a lost machine before, unless they are just starting
_LAST_CALL_SECONDS = 10.0  # at the new store of a run under way, whose machines notice a loss at about the same time
_HANDING_OVER_SECONDS = 15.0
_PARTING_SECONDS = 300.0  # as long as torch's agent waits for the others at the end
_HEARD_SECONDS = 2.0  # for a look of each machine


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
        begin = time.monotonic()
        while (seconds := time.monotonic() - begin) < _PARTING_SECONDS:
            self.look()
            if not self._alive or (seconds > _HEARD_SECONDS and is_hurried()):
                return
            time.sleep(_LOOK_SECONDS)

    def halt(self) -> None:
        """End the thread, without a word to the machines."""
        self._done.set()
        if self._thread is not None:
            self._thread.join()

    def hand_over(self, own: str, is_hurried: Callable[[], bool], end: End) -> None:
        """End without the end of the run, once the other machines of the membership wait for the next one.

        If all of them have left too, the run ends; see `stop`.

        Args:
            own: ID of the machine that serves the store, and leaves.
            is_hurried: See `stop`.
            end: How the run has ended for this machine.
        """
        self.halt()
        deadline = time.monotonic() + _HANDING_OVER_SECONDS
        while time.monotonic() < deadline:
            self._read_machines()
            members = [machine for machine in self._alive if machine.id in self._last.machines and machine.id != own]
            if not members:
                self.stop(is_hurried, end)
                return
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
        if formed is not None and not final_failure(PrefixStore(str(self._last.number), self._store)):
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
        alive = []
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
                alive.append(Machine(number, own.id, own.host, *rest, is_new))
        while self._ended:
            number = self._ended.popleft()
            self._gone.add(number)
            if number in self._beats:  # the last one may have come since they were read
                self._beats[number] = (self._store.get(beat_key(number)), self._beats[number][1])
        self._alive = [machine for machine in alive if machine.number not in self._gone]
        self._counted = counted(self._last, self._alive, self._least, self._is_only_store)

    def _publish(self, formed: Formed) -> None:
        before, now = newest(self._last, waiting(self._last, self._counted)), formed.membership
        gone = tuple(host for own, host in zip(before.machines, before.hosts, strict=True) if own not in now.machines)
        joined = tuple(self._hosts[own] for own in now.machines if before.number and own not in before.machines)
        numbers = tuple(self._numbers[own] for own in now.machines)
        self._last, self._published, self._lost = now, numbers, []
        published = Published(now, numbers, formed.bases, formed.right, gone, joined, self._serve_ranks())
        self._store.set(MEMBERSHIP, published.to_json())
